"""The operation log in memory, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from outrider.audit_chain import AuditAnchor
from outrider.operation_log import (
    LINES_MAX,
    OperationCriteria,
    OperationEnd,
    OperationLine,
    anchor_of_removed,
    lines_of,
    oldest_kept,
    removable,
    seal_operations,
)
from outrider.stores.memory.tables import OperationTable, SagaTables

START = 0, -1
"""The place before all lines: numbers begin with 1."""


class MemoryOperationLog:
    """The operation log of a store."""

    def __init__(self, table: OperationTable, sagas: SagaTables, now: Callable[[], datetime]) -> None:
        self._table, self._sagas, self._now = table, sagas, now

    def write(
        self, actor: str, verb: str, events: Iterable[tuple[UUID | None, str | None]] = ((None, None),), **detail: Any
    ) -> None:
        """Write the lines of a command."""
        self._table.head, lines = seal_operations(
            self._table.head, lines_of(self._now(), actor, verb, events, **detail)
        )
        self._table.lines += [line._replace(place=line.line) for line in lines]

    async def find(self, criteria: OperationCriteria) -> list[OperationLine]:
        found = [
            line
            for line in reversed(self._table.lines)
            if criteria.event_id in (None, line.event_id)
            and criteria.actor in (None, line.actor)
            and (criteria.since is None or line.at >= criteria.since)
        ]
        return found[: criteria.limit]

    async def record(self, actor: str, verb: str, **detail: Any) -> None:
        self.write(actor, verb, **detail)

    async def lines(self, after: tuple[int, Any] | None, limit: int) -> list[OperationLine]:
        return self._after(after)[:limit]

    async def end(self, after: tuple[int, Any] | None) -> OperationEnd:
        return OperationEnd(self._table.head, 0, self._after(after))

    async def last_anchor(self) -> AuditAnchor | None:
        return self._anchor

    async def remove_lines(self, days: float) -> int:
        now, total = self._now(), 0
        while removed := removable(oldest_kept(now, days), self._anchor, self._table.lines[:LINES_MAX]):
            last = self._sagas.anchors[-1] if self._sagas.anchors else None
            self._sagas.anchors.append(anchor_of_removed(last, self._anchor, removed, now))
            self._table.lines = self._table.lines[len(removed) :]
            total += len(removed)
        return total

    @property
    def _anchor(self) -> AuditAnchor | None:
        return next((anchor for anchor in reversed(self._sagas.anchors) if not anchor.chains), None)

    def _after(self, after: tuple[int, Any] | None) -> list[OperationLine]:
        return [line for line in self._table.lines if (line.line or 0, line.place) > (after or START)]
