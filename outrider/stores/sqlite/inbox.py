"""The inbox in a SQLite file: what a consumer needs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from outrider.clock import Clock
from outrider.delivery import Arrival, InboxStream
from outrider.errors import OutriderError
from outrider.inbox_store import Admitted, Cause, Entry, InboxDesk, InboxPruned, Overdue, Resumed, Standing
from outrider.stores.sqlite import inbox_verbs
from outrider.stores.sqlite.inbox_desk import SqliteInboxDesk
from outrider.stores.sqlite.inbox_verbs import SQL
from outrider.stores.sqlite.lending import Lending
from outrider.stores.sqlite.saga_verbs import prune_barriers

ADOPT_MAX = 100
PRUNE_MAX = 1_000


class SqliteInbox(Lending):
    """Receipts in a SQLite file that `outrider db migrate` has prepared, beside the data that handlers change.

    Handlers get a `sqlite3.Connection` in an open transaction. Time is the host's, given by the clock::

        inbox_store = SqliteInbox("shop.db")
    """

    WHAT, INSTALLED = "inbox", SQL["installed"]

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        super().__init__(path, clock=clock)
        self.desk: InboxDesk = SqliteInboxDesk(self.read, self.write, self.clock)

    async def answers(self) -> bool:
        try:
            await self.read(inbox_verbs.installed)
        except OutriderError:
            return False
        return True

    async def admit(
        self, tx: sqlite3.Connection, consumer: str, arrivals: Sequence[Arrival], *, gated: bool
    ) -> Admitted:
        return await self._in(tx, inbox_verbs.admit, consumer, arrivals, gated=gated, now=self._now())

    async def conclude(
        self,
        tx: sqlite3.Connection,
        consumer: str,
        entries: Sequence[Entry],
        standings: Mapping[InboxStream, Standing],
    ) -> Mapping[UUID, int]:
        return await self._in(tx, inbox_verbs.conclude, consumer, entries, standings, self._now())

    async def draining(self, consumer: str, limit: int, *, cause: Cause = Cause.DRAINING) -> list[InboxStream]:
        return await self.read(inbox_verbs.draining, consumer, cause, limit)

    async def resume(
        self,
        tx: sqlite3.Connection,
        consumer: str,
        stream: InboxStream,
        *,
        by_sequence: bool,
        limit: int,
        early: bool = False,
    ) -> Resumed | None:
        resume = partial(inbox_verbs.resume, by_sequence=by_sequence, limit=limit, early=early, now=self._now())
        return await self._in(tx, resume, consumer, stream)

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        return await self.read(inbox_verbs.overdue, consumer, self._now() - seconds, limit)

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove what is older; also find again what should never have been lost from sight."""
        facts = {"consumer": consumer, "now": self._now(), "limit": ADOPT_MAX}
        await self.write(inbox_verbs.change, "release_holds", facts)
        await self.write(inbox_verbs.change, "adopt_orphans", facts)
        dead_letters = await self._in_batches("prune_dead_letters", consumer, dead_letter_days)
        return InboxPruned(await self._in_batches("prune_receipts", consumer, receipt_days), dead_letters)

    async def prune_barriers(self, days: float) -> int:
        return await self._until_none_is_left(prune_barriers, self._older(days))

    async def _in_batches(self, verb: str, consumer: str, days: float) -> int:
        return await self._until_none_is_left(inbox_verbs.change, verb, {"consumer": consumer, **self._older(days)})

    def _older(self, days: float) -> dict[str, float]:
        return {"before": (self.clock.now() - timedelta(days=days)).timestamp(), "limit": PRUNE_MAX}

    async def _until_none_is_left(self, job: Callable[..., int], *args: Any) -> int:
        total, removed = 0, PRUNE_MAX
        while removed == PRUNE_MAX:
            removed = await self.write(job, *args)
            total += removed
        return total
