"""What people ask about sagas, in memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.saga_store import ENDED, Instance, Record, SagaCriteria, Status
from outrider.stores.memory.saga_tables import SagaRow, SagaTables


class MemorySagaDesk:
    """Listing, counting and showing."""

    def __init__(self, tables: SagaTables, now: Callable[[], datetime]) -> None:
        self._tables, self._now = tables, now

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        names = ("saga_type", "correlation_id", "status", "needs_attention")
        given = {name: wanted for name in names if (wanted := getattr(criteria, name)) is not None}
        found = [
            saga
            for row, saga in self._tables.living()
            if (not criteria.ids or saga.saga_id in criteria.ids)
            and all(getattr(saga, name) == wanted for name, wanted in given.items())
            and (criteria.stuck_seconds is None or self._stuck(row, saga, criteria.stuck_seconds))
        ]
        found.sort(key=lambda saga: saga.saga_id)
        found.sort(key=lambda saga: (saga.needs_attention, saga.updated_at), reverse=True)
        return found[: criteria.limit]

    async def counts(self) -> dict[str, int]:
        sagas = [saga for _, saga in self._tables.living()]
        counts = {status.value: sum(saga.status is status for saga in sagas) for status in Status}
        return {**counts, "needs_attention": sum(saga.needs_attention for saga in sagas)}

    async def show(self, saga_id: UUID) -> Record | None:
        return record_of(self._tables.sagas.rows.get(saga_id, SagaRow()), self._now())

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        trail = self._tables.sagas.rows.get(saga_id, SagaRow()).trail
        return [dict(line) for line in trail[:limit]]

    def _stuck(self, row: SagaRow, saga: Instance, seconds: float) -> bool:
        """Tell whether nobody works on it: overdue, or with mail that nobody has seen."""
        before = self._now() - timedelta(seconds=seconds)
        overdue = saga.wake_at is not None and saga.wake_at < before
        unread = saga.owner is None and any(piece.posted_at < before for piece in row.unseen)
        return saga.status not in ENDED and (overdue or unread)


def record_of(row: SagaRow, now: datetime) -> Record | None:
    """Return a saga as it is read: the journal by place, the mail as it came."""
    if row.instance is None:
        return None
    journal = sorted(row.journal.values(), key=lambda entry: (entry.phase, entry.place, entry.step))
    mail = [piece for _, piece in sorted(row.mail.items())]
    return Record(row.instance, tuple(journal), tuple(mail), now)
