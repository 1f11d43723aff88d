"""What every driver does, each in the caller's open transaction. A driver says how; this says what.

A driver's module has these five as functions. Each returns the result, or something to await if the connection is
asynchronous; `recognise` knows which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.saga_store import NewMail, NewSaga, Phase
from outrider.store import Drafts, Hold

Perform = Callable[[Any, str, tuple[Any, ...], str], Any]
"""Takes a connection, a verb, its arguments and the schema."""


class Verbs:
    """The five, all through one function."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform

    def stage(self, conn: Any, drafts: Drafts, hold: Hold | None, schema: str) -> Any:
        """Stage drafts; the result is what was really inserted::

        placed = await stage(conn, drafts([Event("order.placed", {})], StagingRules()), None, "outrider")
        """
        return self._perform(conn, "stage", (drafts, hold), schema)

    def start_saga(self, conn: Any, new: NewSaga, schema: str) -> Any:
        """Start a saga; the result is False if it is there already::

        await start_saga(conn, NewSaga(saga_id, "order", 1, "A-7", b"{}"), "outrider")
        """
        return self._perform(conn, "start_saga", (new,), schema)

    def post_mail(self, conn: Any, mail: Sequence[NewMail], schema: str) -> Any:
        """Post mail to sagas; the result is how many were new::

        await post_mail(conn, [NewMail(saga_id, MailKind.REPLY, "stock.reserved", key, b"{}", event_id)], "outrider")
        """
        return self._perform(conn, "post_mail", (mail,), schema)

    def barrier_enter(self, conn: Any, participant: str, key: str, phase: Phase, schema: str) -> Any:
        """Let a command through a participant's barrier, or say what became of it before::

        entered = await barrier_enter(conn, "stock", command.headers["saga_key"], Phase.ACTION, "outrider")
        """
        return self._perform(conn, "barrier_enter", (participant, key, phase), schema)

    def barrier_keep(  # noqa: PLR0917 - every driver takes the same, in the same order
        self, conn: Any, participant: str, key: str, phase: Phase, reply: bytes, schema: str
    ) -> Any:
        """Keep what was answered to a command, as JSON::

        await barrier_keep(conn, "stock", key, Phase.ACTION, b'{"reserved": 3}', "outrider")
        """
        return self._perform(conn, "barrier_keep", (participant, key, phase, reply), schema)
