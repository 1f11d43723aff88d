"""What is written of sagas through a session: start, post, and a participant's barrier.

Pure: the store or a driver carries the steps out. Each begins with one look at all that it depends on. If somebody else
has written the same since the transaction began, the server refuses, and the transaction has to be run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from outrider.clock import Clock
from outrider.errors import Misuse
from outrider.saga_store import Entered, NewMail, NewSaga, Phase
from outrider.stores.mongo.database import Document, now_expression
from outrider.stores.mongo.errors import NOT_INSTALLED
from outrider.stores.mongo.saga_documents import DEAF, barrier_place, mail_place, noted, posted, started
from outrider.stores.mongo.steps import Steps, step
from outrider.stores.saga_rows import STARTED

Seen = dict[str, Any]
"""What was found, by name, and `now`."""


def start(saga: NewSaga, clock: Clock | None = None) -> Steps[bool]:
    """Insert an instance that is due at once, and the first line of its trail; False if it is there already."""
    name = {"saga_type": saga.saga_type, "correlation_id": saga.correlation_id}
    seen = yield from look(clock, saga_instance={"$or": [{"_id": saga.saga_id}, name]})
    if seen["saga_instance"]:
        return False
    document = started(saga, seen["now"])
    yield step("saga_instance", "insert_one", document)
    yield step("saga_audit_log", "insert_one", noted(document, document["notes"], STARTED, seen["now"]))
    return True


def post(mail: Sequence[NewMail], clock: Clock | None = None) -> Steps[int]:
    """Put mail into the boxes of sagas that may still read it; return how many were new.

    The instance is only read: whoever posts keeps no owner from saving. What comes while a saga is owned stays unseen,
    and whoever has no owner and unseen mail can be claimed; so nothing is lost, whichever of the two commits first.
    """
    if not mail:
        return 0
    pieces: dict[tuple[UUID, UUID], NewMail] = {}
    for piece in mail:
        pieces.setdefault((piece.saga_id, piece.event_id), piece)
    listening = {"_id": {"$in": list({piece.saga_id for piece in mail})}, "status": {"$nin": DEAF}}
    known = {"_id": {"$in": [mail_place(*place) for place in pieces]}}
    seen = yield from look(clock, saga_instance=listening, saga_mailbox=known)
    sagas = {row["_id"]: row for row in seen["saga_instance"]}
    old = {(row["_id"]["saga_id"], row["_id"]["event_id"]) for row in seen["saga_mailbox"]}
    fresh = [piece for place, piece in pieces.items() if place not in old and _meant(piece, sagas)]
    if fresh:
        documents = [posted(piece, sagas[piece.saga_id], seen["now"]) for piece in fresh]
        yield step("saga_mailbox", "insert_many", documents)
    return len(fresh)


def _meant(piece: NewMail, sagas: Mapping[UUID, Document]) -> bool:
    found = sagas.get(piece.saga_id)
    return found is not None and piece.saga_type in (None, found["saga_type"])


def enter(participant: str, key: str, phase: Phase, clock: Clock | None = None) -> Steps[Entered]:
    """Let a command through a participant's barrier; a compensation bars its action first, unless that has come."""
    places = {each: barrier_place(participant, key, each) for each in Phase}
    seen = yield from look(clock, saga_barrier={"_id": {"$in": list(places.values())}})
    known = {Phase(row["_id"]["phase"]): row for row in seen["saga_barrier"]}
    if before := known.get(phase):
        reply = before.get("reply")
        return Entered(False, before["barred"], None if reply is None else reply.encode())
    barred = phase is Phase.COMPENSATION and Phase.ACTION not in known
    came = [Phase.ACTION, phase] if barred else [phase]
    documents = [{"_id": places[each], "barred": barred, "at": seen["now"]} for each in came]
    yield step("saga_barrier", "insert_many", documents)
    return Entered(True, barred)


def keep(participant: str, key: str, phase: Phase, reply: bytes) -> Steps[None]:
    """Keep what was answered."""
    place = {"_id": barrier_place(participant, key, phase)}
    yield step("saga_barrier", "update_one", place, {"$set": {"reply": reply.decode()}})


def look(clock: Clock | None, **wanted: Document) -> Steps[Seen]:
    """Ask what time it is, and find documents of several collections, all at once."""
    pipeline: list[Document] = [{"$match": {"_id": "lanes"}}, {"$project": {"now": now_expression(clock)}}]
    for name, condition in wanted.items():
        pipeline.append({"$lookup": {"from": name, "pipeline": [{"$match": condition}, _FACTS], "as": name}})
    rows = yield step("outbox_meta", "aggregate", pipeline)
    if not rows:
        raise Misuse(f"the saga store is not installed in this database; {NOT_INSTALLED}")
    seen: Seen = rows[0]
    return seen


# Whatever one of them needs to know. States and bodies may be large, and nobody asks for them.
_FACTS = {"$project": {"saga_type": 1, "definition_version": 1, "barred": 1, "reply": 1}}
