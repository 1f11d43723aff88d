"""A saga store that remembers what was staged in its transactions, once they have committed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import outrider
from outrider.event import Event
from outrider.saga_store import Entered, NewMail, NewSaga, Phase, SagaStore, Undelivered


class SagaRecorder:
    """Stands before a saga store; what it does not know, the store does. It writes for sagas as an Outbox does."""

    def __init__(self, store: SagaStore) -> None:
        self._store = store
        self._open: dict[int, list[Event]] = {}
        self.staged: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction of the store."""
        return self._remembering(self._store.transaction())

    def lend(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction for a step's function."""
        return self._remembering(self._store.lend())

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events; they are remembered when the transaction has committed."""
        ids = await outrider.stage(conn, *events)
        named = [replace(event, event_id=event_id) for event, event_id in zip(events, ids, strict=True)]
        self._open.setdefault(id(conn), []).extend(named)
        return ids

    async def undelivered(self, tx: Any, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        """Say that everything has left: what is staged goes out at once, as no relay runs in a test."""
        return {}

    async def start_saga(self, conn: Any, saga: NewSaga) -> bool:
        """Start a saga, by the store's own time."""
        return await self._store.start(conn, saga)

    async def post_mail(self, conn: Any, mail: Sequence[NewMail]) -> int:
        """Post mail, by the store's own time."""
        return await self._store.post(conn, mail)

    async def barrier_enter(self, conn: Any, participant: str, key: str, phase: Phase) -> Entered:
        """Let a command through a participant's barrier."""
        return await outrider.Outbox().barrier_enter(conn, participant, key, phase)

    async def barrier_keep(self, conn: Any, participant: str, key: str, phase: Phase, reply: bytes) -> None:
        """Keep what was answered to a command."""
        await outrider.Outbox().barrier_keep(conn, participant, key, phase, reply)

    @asynccontextmanager
    async def _remembering(self, transaction: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        mine = 0
        try:
            async with transaction as tx:
                mine = id(tx)
                self._open.pop(mine, None)
                yield tx
            self.staged += self._open.get(mine, [])
        finally:
            self._open.pop(mine, None)
