"""The audit log of sagas in memory, for tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from outrider.audit_chain import AuditAnchor, AuditHead, AuditLine, prune_anchor
from outrider.saga.model import AuditCriteria, Instance
from outrider.stores.memory.tables import SagaRow, SagaTables
from outrider.stores.rows import close_sagas, head_of


class MemoryAudit:
    """The audit log of all sagas."""

    def __init__(self, tables: SagaTables, now: Callable[[], datetime]) -> None:
        self._tables, self._now = tables, now

    async def find(self, criteria: AuditCriteria) -> list[AuditLine]:
        found = [
            line
            for line in self._lines()
            if criteria.saga_id in (None, line.saga_id)
            and criteria.actor in (None, line.actor)
            and (criteria.since is None or line.at >= criteria.since)
        ]
        found.sort(key=lambda line: (line.at, line.saga_id, line.place), reverse=True)
        return found[: criteria.limit]

    async def lines(self, after: tuple[UUID, int], limit: int) -> list[AuditLine]:
        return [line for line in self._lines() if (line.saga_id, line.place) > after][:limit]

    async def heads(self, saga_ids: Collection[UUID]) -> list[AuditHead]:
        living = [head_of(instance) for _, instance in self._tables.living()]
        heads = [head for head in (*self._tables.heads, *living) if head.saga_id in saga_ids]
        return sorted(heads, key=lambda head: (head.saga_id, head.anchor is None, head.anchor or 0))

    async def chain(self, saga_id: UUID) -> tuple[list[AuditHead], list[AuditLine]]:
        row = self._tables.sagas.rows.get(saga_id, SagaRow())
        return await self.heads([saga_id]), list(row.audit)

    async def missing(self, limit: int) -> list[UUID]:
        known = {instance.saga_id for _, instance in self._tables.living()}
        known |= {head.saga_id for head in self._tables.heads}
        return [saga_id for saga_id in known if not self._tables.sagas.rows.get(saga_id, SagaRow()).audit][:limit]

    async def anchors(self, after: int, limit: int) -> list[AuditAnchor]:
        return [anchor for anchor in self._tables.anchors if anchor.number > after][:limit]

    async def anchor_heads(self, number: int) -> list[AuditHead] | None:
        if any(anchor.covers == number for anchor in self._tables.anchors):
            return None
        return [head for head in self._tables.heads if head.anchor == number]

    def close(self, old: Sequence[tuple[SagaRow, Instance]], now: datetime) -> None:
        """Leave an anchor, and the heads of the chains of sagas that are removed."""
        if old:
            closed = [(instance, row.audit[-1].place if row.audit else None) for row, instance in old]
            anchor, heads = close_sagas(self._last, closed, now)
            self._tables.anchors.append(anchor)
            self._tables.heads += [head._replace(anchor=anchor.number) for head in heads]

    async def remove_lines(self, days: float) -> int:
        """Remove the lines of sagas that were removed together, once all are old; return the number of lines."""
        now, removed = self._now(), 0
        before = now - timedelta(days=days)
        while (closed := self._oldest) and closed.until < before and (last := self._last):
            self._tables.anchors.append(prune_anchor(last, closed, now))
            removed += sum(self._remove(head) for head in self._tables.heads if head.anchor == closed.number)
            self._tables.heads = [head for head in self._tables.heads if head.anchor != closed.number]
        return removed

    def _remove(self, head: AuditHead) -> int:
        row = self._tables.sagas.rows[head.saga_id]
        kept = [line for line in row.audit if head.place is None or line.place > head.place]
        removed, row.audit = len(row.audit) - len(kept), kept
        if not kept and row.instance is None:
            del self._tables.sagas.rows[head.saga_id]
        return removed

    @property
    def _oldest(self) -> AuditAnchor | None:
        numbers = {head.anchor for head in self._tables.heads}
        return next((anchor for anchor in self._tables.anchors if anchor.number in numbers), None)

    @property
    def _last(self) -> AuditAnchor | None:
        return self._tables.anchors[-1] if self._tables.anchors else None

    def _lines(self) -> list[AuditLine]:
        return [line for _, row in sorted(self._tables.sagas.rows.items()) for line in row.audit]
