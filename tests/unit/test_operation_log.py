"""The operation log: any change of a line is named, details can be removed, and a removal meanwhile is no finding."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from outrider.audit_chain import AuditCheck
from outrider.operation_log import (
    OperationEnd,
    OperationHead,
    OperationLine,
    digest_of,
    lines_of,
    oldest_kept,
    removable,
    seal_operations,
    verify_operations,
)
from outrider.stores.memory import MemoryStore
from outrider.stores.memory.operation_log import MemoryOperationLog
from outrider.testing import ManualClock

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)

DAY_SECONDS = 86_400

CHANGES = [
    *({"at": AT + timedelta(1)}, {"actor": "eve"}, {"verb": "discard"}, {"event_id": UUID(int=8)}),
    *({"consumer": "other"}, {"detail": "{}"}, {"traceparent": "00"}, {"salt": b"x"}, {"hash": b"x"}, {"digest": b"x"}),
    *({"line": 9}, {"event_id": None}),
]


async def _log(count: int = 4) -> tuple[MemoryOperationLog, MemoryStore]:
    store = MemoryStore(clock=ManualClock(start=AT))
    store.commands.write("ann", "replay", [(UUID(int=n), "billing") for n in range(count)], topic="orders")
    return store.commands, store


async def _places(log: MemoryOperationLog) -> list[int | None]:
    return [finding.line for finding in (await verify_operations(log, AuditCheck())).findings]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
async def test_a_change_of_any_column_names_the_line(change: dict[str, Any]) -> None:
    log, store = await _log()
    lines = store.tables.operations.lines
    assert await _places(log) == []
    lines[2] = lines[2]._replace(**change)
    assert (await _places(log))[0] in ({9, 3} if "line" in change else {3})


async def test_details_can_be_removed_while_the_chain_still_verifies() -> None:
    log, store = await _log()
    lines = store.tables.operations.lines
    kept, digest = lines[1], digest_of(lines[1])
    lines[1] = kept._replace(detail="", salt=None, digest=digest)
    assert await _places(log) == []
    assert (await verify_operations(log, AuditCheck())).without_details == 1
    lines[1] = kept._replace(digest=digest)
    assert await _places(log) == [2]


async def test_pages_are_read_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.operation_log.PAGE_LINES", 3)
    log, _ = await _log(10)
    seen: list[int] = []
    report = await verify_operations(log, AuditCheck(), lambda report: seen.append(report.lines))
    assert (report.lines, report.findings, seen) == (10, [], [3, 6, 9])


class BusyLog(MemoryOperationLog):
    """A log that somebody works on between the reads of a verification."""

    between: Callable[[], None] | None = None

    async def end(self, after: tuple[int, Any] | None) -> OperationEnd:
        work, self.between = self.between, None
        if work:
            work()
        return await super().end(after)


async def test_lines_that_are_written_or_removed_meanwhile_are_no_finding() -> None:
    clock = ManualClock(start=AT)
    store = MemoryStore(clock=clock)
    log = BusyLog(store.tables.operations, store.sagas, clock.now)
    log.write("ann", "replay", [(UUID(int=n), None) for n in range(4)])
    log.between = lambda: log.write("bob", "discard", [(UUID(int=9), None)])
    report = await verify_operations(log, AuditCheck())
    assert (report.lines, report.findings) == (5, [])
    clock.advance(seconds=2 * DAY_SECONDS)
    log.write("ann", "key_add", key="k1")

    def remove() -> None:
        with pytest.raises(StopIteration):
            log.remove_lines(1).send(None)

    log.between = remove
    report = await verify_operations(log, AuditCheck())
    assert (report.lines, report.findings) == (1, [])


def test_only_whole_days_and_whole_stretches_of_the_chain_are_removed() -> None:
    assert oldest_kept(AT, 0) == datetime(2026, 1, 31, tzinfo=UTC)
    _, lines = seal_operations(OperationHead(), lines_of(AT, "ann", "replay", [(UUID(int=n), None) for n in range(4)]))
    later = AT + timedelta(1)

    def removed(*chosen: OperationLine) -> list[int | None]:
        return [line.line for line in removable(later, None, chosen)]

    assert removed(*lines) == [1, 2, 3, 4]
    assert removed(*lines[:2], lines[2]._replace(at=later), lines[3]) == [1, 2]
    assert removed(*lines[:2], lines[3]) == [1, 2]
    assert removed(*lines[:2], lines[1], lines[2]) == [1, 2]
    assert removed(*(line._replace(line=None) for line in lines)) == [None] * 4
