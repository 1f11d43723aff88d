"""Sagas in a SQLite file: what a worker needs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from outrider.clock import Clock
from outrider.saga_store import Claim, NewMail, NewSaga, Record, SagaDesk, SagaPruned, Turn, Undelivered
from outrider.stores.sqlite import saga_verbs
from outrider.stores.sqlite.lending import Lending
from outrider.stores.sqlite.saga_desk import SqliteSagaDesk
from outrider.stores.sqlite.saga_verbs import SQL
from outrider.stores.sqlite.wakeups import Listening

PRUNE_MAX = 1_000
DAY_SECONDS = 86_400


class SqliteSagas(Lending):
    """Sagas in a SQLite file that `outrider db migrate` has prepared, beside the data that their steps change.

    Steps get a `sqlite3.Connection` in an open transaction. Time is the host's, given by the clock::

        saga_store = SqliteSagas("shop.db")
    """

    WHAT, INSTALLED = "saga store", SQL["installed"]
    one_at_a_time = True

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        super().__init__(path, clock=clock)
        self.desk: SagaDesk = SqliteSagaDesk(self.read, self.clock)
        self._listeners: list[Callable[[], None]] = []

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        # Turns are always on our own connection; only the functions of steps have the application's.
        return self._own("BEGIN IMMEDIATE")

    async def start(self, tx: sqlite3.Connection, saga: NewSaga) -> bool:
        return await self._in(tx, saga_verbs.start, saga, self._now())

    async def post(self, tx: sqlite3.Connection, mail: Sequence[NewMail]) -> int:
        return await self._in(tx, saga_verbs.post, mail, self._now())

    async def claim(
        self, worker: str, definitions: Collection[tuple[str, int]], *, limit: int, lease_seconds: float
    ) -> list[Record]:
        # Looking keeps no writer waiting, and nearly always there is nothing to take.
        if not await self.read(saga_verbs.candidates, definitions, limit, self._now()):
            return []
        return await self.write(
            saga_verbs.claim, worker, definitions, limit=limit, lease_seconds=lease_seconds, now=self._now()
        )

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        if not claims:
            return frozenset()
        return await self.write(saga_verbs.renew, claims, self._now() + lease_seconds)

    async def load(self, tx: sqlite3.Connection, saga_id: UUID, *, for_update: bool = False) -> Record | None:
        """Return a saga; its row is locked anyway, as everything is."""
        return await self._in(tx, saga_verbs.load, saga_id, self._now())

    async def save(self, tx: sqlite3.Connection, claim: Claim, turn: Turn, lease_seconds: float) -> datetime:
        now = self.clock.now()
        await self._in(tx, saga_verbs.save, claim, turn, lease_seconds, now.timestamp())
        return now

    async def undelivered(self, tx: sqlite3.Connection, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        return await self._in(tx, saga_verbs.undelivered, event_ids)

    async def prune(self, *, saga_days: float, audit_days: float, barrier_days: float) -> SagaPruned:
        """Remove what is older; also mail that came when its saga had just ended."""
        await self.write(saga_verbs.drop_strays)
        return SagaPruned(
            await self._in_batches(saga_verbs.prune_sagas, saga_days),
            await self._in_batches(saga_verbs.prune_notes, audit_days),
            await self._in_batches(saga_verbs.prune_barriers, barrier_days),
        )

    async def hint(self) -> None:
        """Wake this process's workers now; they notice every commit by themselves, a moment later."""
        for wake in self._listeners:
            wake()

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return Listening(self._listeners, wake, self._path)

    async def _in_batches(self, job: Callable[[sqlite3.Cursor, dict[str, Any]], int], days: float) -> int:
        facts = {"before": self._now() - days * DAY_SECONDS, "limit": PRUNE_MAX}
        total, removed = 0, PRUNE_MAX
        while removed == PRUNE_MAX:
            removed = await self.write(job, facts)
            total += removed
        return total
