"""The keys of subjects in memory."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.clock import Clock, SystemClock
from outrider.event import erased_name
from outrider.privacy.store import NewSubjectKey, SubjectKeyCounts, WrappedSubjectKey


class MemorySubjectKeys:
    """The table of the keys of subjects in the memory of the process.

    >>> MemorySubjectKeys().table
    {}
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.table: dict[str, WrappedSubjectKey] = {}

    async def subject_keys(self, subjects: Sequence[str], key_ids: Sequence[str]) -> list[WrappedSubjectKey]:
        return [key for key in self.table.values() if key.subject in subjects or key.id in key_ids]

    async def insert_subject_keys(self, keys: Sequence[NewSubjectKey]) -> None:
        for key in keys:
            if not self._live(key.subject):
                self.table[key.id] = WrappedSubjectKey(key.id, key.subject, key.wrapped, self.clock.now(), None)

    async def destroy_subject_key(self, subject: str) -> list[str]:
        live, now = self._live(subject), self.clock.now()
        for key in live:
            self.table[key.id] = key._replace(subject=erased_name(subject), wrapped=None, destroyed_at=now)
        return [key.id for key in live]

    async def subject_key_page(self, after: str, limit: int) -> list[WrappedSubjectKey]:
        live = (key for key in self.table.values() if key.destroyed_at is None and key.id > after)
        return sorted(live, key=lambda key: key.id)[:limit]

    async def rewrap_subject_keys(self, changes: Sequence[tuple[str, str, str]]) -> int:
        done = [(key_id, after) for key_id, before, after in changes if self.table[key_id].wrapped == before]
        for key_id, after in done:
            self.table[key_id] = self.table[key_id]._replace(wrapped=after)
        return len(done)

    async def count_subject_keys(self) -> SubjectKeyCounts:
        live = sum(key.destroyed_at is None for key in self.table.values())
        return SubjectKeyCounts(live, len(self.table) - live)

    async def close(self) -> None:
        """Do nothing: the keys stay as long as the object."""

    def _live(self, subject: str) -> list[WrappedSubjectKey]:
        return [key for key in self.table.values() if key.subject == subject and key.destroyed_at is None]
