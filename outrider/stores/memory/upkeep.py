"""Upkeep of the memory store."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from outrider.outcome import Policy
from outrider.store import Pruned, Retention, Swept

if TYPE_CHECKING:
    from outrider.stores.memory.store import MemoryStore


class MemoryUpkeep:
    """Keeps the tables bounded."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def sweep(self) -> list[Swept]:
        tables, now = self._store.tables, self._store.clock.now()
        dead = [relay for relay, until in tables.relays.items() if until <= now]
        for relay in dead:
            del tables.relays[relay]
        return [Swept(relay, sum(row.owner == relay for row in tables.lanes.values())) for relay in dead]

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        duties, now = self._store.tables.duties, self._store.clock.now()
        if name in duties and duties[name] > now:
            return False
        duties[name] = now + timedelta(seconds=every_seconds)
        return True

    async def prepare(self) -> None:
        """Nothing to make ahead of time."""

    async def prune(self, retention: Retention) -> Pruned:
        tables, now = self._store.tables, self._store.clock.now()
        sent = [i for i, (_, at) in tables.archive.items() if at < now - timedelta(days=retention.archive_days)]
        # A held dead letter is the only thing that lets its stream go on, so it stays until a person acts.
        limit = now - timedelta(days=retention.dead_letter_days)
        dead = [i for i, row in tables.dead.items() if row.buried_at < limit and row.policy != Policy.HOLD]
        for event_id in sent:
            del tables.archive[event_id]
        for event_id in dead:
            del tables.dead[event_id]
        oldest = now - timedelta(days=retention.operation_days)
        kept = [operation for operation in tables.operations if operation["at"] >= oldest]
        gone = len(tables.operations) - len(kept)
        tables.operations[:] = kept
        return Pruned(len(sent), len(dead), gone)
