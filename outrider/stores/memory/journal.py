"""The journal of the outbox in memory. Its entries have no transaction id; the log position is their number."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from outrider.outbox.model import EventHistory, EventPlace, JournalKind, JournalPage, JournalSwitch, OutboxJournalEntry
from outrider.stores.journal_rows import FIRST_EVENT
from outrider.stores.memory.tables import JournalRow

if TYPE_CHECKING:
    from outrider.stores.memory.outbox import MemoryStore


def add(store: MemoryStore, kind: JournalKind, event_ids: Iterable[UUID]) -> None:
    """Journal events, if the journal is on."""
    tables = store.tables
    if tables.journal_switch.is_on:
        for event_id in event_ids:
            tables.journal_number += 1
            tables.journal.append(JournalRow(event_id, kind, tables.journal_number, store.clock.now()))


class MemoryJournal:
    """The switch and the pages of the journal."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def switch(self) -> JournalSwitch:
        return self._store.tables.journal_switch

    async def turn(self, *, on: bool) -> bool:
        tables = self._store.tables
        if tables.journal_switch.is_on == on:
            return False
        tables.journal_start = tables.journal_number
        tables.journal_switch = JournalSwitch(on, self._store.clock.now(), self._store.next_position())
        return True

    async def histories(self, after: UUID | None, limit: int) -> JournalPage:
        tables = self._store.tables
        found: dict[UUID, list[OutboxJournalEntry]] = {}
        for row in tables.journal:
            if row.number > tables.journal_start and row.event_id > (after or FIRST_EVENT):
                entry = OutboxJournalEntry(row.kind, None, str(row.number), row.at)
                found.setdefault(row.event_id, []).append(entry)
        chosen = sorted(found)[:limit]
        histories = [EventHistory(event_id, found[event_id], self._places(event_id)) for event_id in chosen]
        return JournalPage(tables.journal_switch, histories, chosen[-1] if len(chosen) < len(found) else None)

    async def unjournaled(self, place: EventPlace, after: UUID | None, limit: int) -> JournalPage:
        tables = self._store.tables
        known = {row.event_id for row in tables.journal if row.number > tables.journal_start}
        held: dict[EventPlace, Iterable[UUID]] = {
            EventPlace.OUTBOX: tables.ids,
            EventPlace.ARCHIVE: tables.archive,
            EventPlace.DEAD_LETTERS: tables.dead,
        }
        found = sorted(event_id for event_id in held[place] if event_id > (after or FIRST_EVENT))
        missing = [EventHistory(i, (), self._places(i)) for i in found[:limit] if i not in known]
        return JournalPage(tables.journal_switch, missing, found[limit - 1] if len(found) > limit else None)

    def prune(self, days: float) -> int:
        """Remove old entries of events that are in no table; return their number."""
        tables, before = self._store.tables, self._store.clock.now() - timedelta(days=days)
        kept = [row for row in tables.journal if row.at >= before or tables.known(row.event_id)]
        removed = len(tables.journal) - len(kept)
        tables.journal[:] = kept
        return removed

    def note_prune(self, days: float) -> None:
        """Note that maintenance is about to remove events of this age from the archive."""
        tables, before = self._store.tables, self._store.clock.now() - timedelta(days=days)
        if tables.journal_switch.is_on:
            pruned = max(before, tables.journal_switch.archive_pruned or before)
            tables.journal_switch = tables.journal_switch._replace(archive_pruned=pruned)

    def _places(self, event_id: UUID) -> dict[EventPlace, int]:
        tables, places = self._store.tables, {}
        if event_id in tables.ids:
            places[EventPlace.OUTBOX] = tables.ids[event_id]
        if event_id in tables.archive:
            places[EventPlace.ARCHIVE] = tables.archive[event_id][0].event.position
        if event_id in tables.dead:
            places[EventPlace.DEAD_LETTERS] = tables.dead[event_id].row.event.position
        return places
