"""The relay's verbs on MongoDB. Each that writes is one transaction, fenced by the lanes it touches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from uuid import UUID

from outrider.clock import Clock
from outrider.event import StagedEvent, Stream
from outrider.finding import Finding
from outrider.store import Desk, Due, Fetched, Hold, Lease, Pulse, Settlement, Upkeep
from outrider.stores.mongo import confirming, fetching, holding, ownership, portions, settling, wakeup
from outrider.stores.mongo.database import Database
from outrider.stores.mongo.desk import MongoDesk
from outrider.stores.mongo.errors import translated
from outrider.stores.mongo.examine import examine
from outrider.stores.mongo.filling import FILL_MAX, fill
from outrider.stores.mongo.staging import read_setting
from outrider.stores.mongo.steps import arun
from outrider.stores.mongo.upkeep import MongoUpkeep

FILLS_MAX = 20
"""How often documents from elsewhere are filled in before a fetch goes on with what there is."""


class MongoStore:
    """Events in a MongoDB that `outrider db migrate` has prepared. Time is the server's, unless a test owns the clock.

    ```python
    store = await MongoStore.open("mongodb://localhost/?replicaSet=rs0")
    ```
    """

    def __init__(self, database: Database, lanes: int, *, archive: bool = True) -> None:
        self.database, self.lanes, self.archive = database, lanes, archive
        self.desk: Desk = MongoDesk(database, lanes)
        self.upkeep: Upkeep = MongoUpkeep(database)
        self._backlog = wakeup.Backlog()

    @classmethod
    async def open(
        cls, url: str, *, schema: str = "outrider", archive: bool = True, clock: Clock | None = None
    ) -> MongoStore:
        """Connect, and see that the outbox is installed."""
        database = await Database.open(url, schema, clock=clock)
        try:
            async with database.session() as session:
                setting = await arun(read_setting(clock), session, schema)
        except BaseException:
            await database.close()
            raise
        return cls(database, setting.lanes, archive=archive)

    async def beat(self, relay: str, lease_seconds: float, *, joining: bool) -> Pulse | None:
        return await self.database.run(ownership.beat(self.database, relay, lease_seconds, joining=joining))

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        return await ownership.claim(self.database, relay, lanes)

    async def release(self, lease: Lease) -> None:
        await self.database.run(ownership.release(self.database, lease))

    async def leave(self, relay: str) -> None:
        await self.database.transaction(ownership.leave, self.database, relay)

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        filled = False
        while (fetched := await fetching.fetch(self.database, lease, quotas, filled=filled)) is None:
            await self._fill()
            filled = True
        self._backlog.fetched(len(fetched.events))
        return fetched

    async def _fill(self) -> None:
        """Fill in documents from elsewhere. Not without end: who never stops writing must not stop what is there."""
        for _ in range(FILLS_MAX):
            if await self.database.transaction(fill, self.database, self.lanes) < FILL_MAX:
                return

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        return await self.database.run(fetching.blocked(self.database, streams))

    async def due(self, lease: Lease, events_max: int) -> Due:
        return await fetching.due(self.database, lease, events_max)

    async def confirm(self, lease: Lease, events: Sequence[StagedEvent]) -> int:
        return sum([await self._confirm(lease, portion) for portion in portions.of_events(events)])

    async def _confirm(self, lease: Lease, events: Sequence[StagedEvent]) -> int:
        if confirming.fit(events):
            try:
                return await self.database.transaction(
                    confirming.confirm, self.database, lease, events, lanes=self.lanes, archive=self.archive
                )
            except confirming.Uneven:
                pass
        return await self.settle(lease, confirming.settlements(events))

    async def settle(self, lease: Lease, settlements: Sequence[Settlement], emptied: Sequence[Stream] = ()) -> int:
        *parts, last = [*portions.of_settlements(settlements)] or [[]]
        if not last and not emptied:
            return 0
        settled = sum([await self._settle(lease, part, ()) for part in parts])
        return settled + await self._settle(lease, last, emptied)

    async def _settle(self, lease: Lease, settlements: Sequence[Settlement], emptied: Sequence[Stream]) -> int:
        return await self.database.transaction(
            settling.settle, self.database, lease, settlements, emptied, lanes=self.lanes, archive=self.archive
        )

    async def renew_hold(self, hold: Hold, event_ids: Sequence[UUID]) -> list[StagedEvent]:
        return await self.database.run(holding.renew(self.database, hold, event_ids))

    async def settle_hold(self, hold: Hold, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        await self.database.transaction(holding.settle, self.database, hold, confirmed, yielded, archive=self.archive)

    async def hint(self) -> None:
        """Nothing to do: the server tells relays of every commit."""

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return wakeup.listening(self.database, wake, backlog=self._backlog)

    async def examine(self) -> list[Finding]:
        with translated(self.database.where):
            return await examine(self.database)

    async def close(self) -> None:
        await self.database.close()
