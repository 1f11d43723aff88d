"""Sagas read whole: instances with their journals and their mail, all at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from outrider.saga_store import Record, Undelivered
from outrider.stores.mongo.database import Document, Documents, Expression, Session
from outrider.stores.mongo.lending import Lent
from outrider.stores.mongo.saga_documents import INSTANCE, to_entry, to_instance, to_mail

Of = Callable[[str], Documents]
"""Returns a collection by its name."""


class Parts:
    """The journals and boxes of several sagas, and which of them have unseen mail."""

    def __init__(self, journal: Sequence[Document], mail: Sequence[Document]) -> None:
        self._journals, self._boxes = _by_saga(journal), _by_saga(mail)
        self.unseen = {row["saga_id"] for row in mail if row.get("unseen")}

    def record(self, row: Mapping[str, Any]) -> Record:
        """Return a saga from its instance, which was read with `facts`."""
        journal = map(to_entry, self._journals[row["_id"]])
        mail = map(to_mail, self._boxes[row["_id"]])
        return Record(
            to_instance(row),
            tuple(sorted(journal, key=lambda entry: (entry.phase, entry.place, entry.step))),
            tuple(sorted(mail, key=lambda piece: piece.mail_id)),
            row["now"],
        )


def facts(now: Expression) -> Document:
    """Return what is to be read of an instance: all that belongs to it, and what time it is."""
    return {**dict.fromkeys(INSTANCE, 1), "now": {"$toDate": now}}


async def read_parts(of: Of, session: Session, ids: Sequence[UUID]) -> Parts:
    """Read what belongs to sagas; saga_step_line and saga_mailbox_order."""
    mine = {"saga_id": {"$in": list(ids)}}
    journal = await of("saga_step").find(mine, session=session).to_list()
    return Parts(journal, await of("saga_mailbox").find(mine, session=session).to_list())


async def undelivered(lent: Lent, event_ids: Sequence[UUID]) -> dict[UUID, Undelivered]:
    """Return those events that are in the outbox or among the dead letters; by their primary keys."""
    found: dict[UUID, Undelivered] = {}
    for name, place in (("outbox_dead_letter", Undelivered.BURIED), ("outbox", Undelivered.WAITING)):
        rows = lent.of(name).find({"_id": {"$in": list(event_ids)}}, {"_id": 1}, session=lent.session)
        found |= {row["_id"]: place for row in await rows.to_list()}
    return found


def _by_saga(rows: Sequence[Document]) -> Mapping[UUID, list[Document]]:
    found: dict[UUID, list[Document]] = defaultdict(list)
    for row in rows:
        found[row["saga_id"]].append(row)
    return found
