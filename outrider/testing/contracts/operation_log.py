"""Contract rules for the operation log: one chain of all commands, whose old lines leave an anchor."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from outrider.audit_chain import KEY_VARIABLE, AuditCheck, read_keys
from outrider.brokers.base import Rejected
from outrider.event import OnDeadLetter
from outrider.operation_log import (
    TRACE_VARIABLE,
    OperationCriteria,
    OperationLine,
    OperationReport,
    content_digest,
    verify_operations,
)
from outrider.outbox.model import Criteria, DeadLetterEdit, Retention
from outrider.testing.fakes import MemoryBroker
from outrider.testing.harness import Harness, order

DAY = 86_400.0

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

KEYS = "correct-horse-battery", "a-second-key-of-ours"


async def _lines(harness: Harness, **criteria: object) -> list[OperationLine]:
    return await harness.store.operations.find(OperationCriteria(**criteria))  # type: ignore[arg-type]


async def _verify(harness: Harness) -> OperationReport:
    return await verify_operations(harness.store.operations, AuditCheck(read_keys()))


async def _record(harness: Harness, count: int, actor: str = "ann") -> None:
    for number in range(count):
        await harness.store.operations.record(actor, "key_add", key=f"k{number}")


class OperationLogContract:
    """Rules for the operation log."""

    async def test_a_command_is_a_line_with_operator_trace_and_object_but_no_payload(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(TRACE_VARIABLE, TRACE)
        [event_id] = await harness.stage(order(1))
        admin = harness.store.admin
        assert await admin.dead_letter(event_id, "ann", {"error": "no"}, "skip")
        [dead] = await admin.dead_letters(Criteria())
        edit = DeadLetterEdit(payload='{"card": "4111"}', headers={"x-note": "secret"}, topic="others")
        assert await admin.edit(event_id, "bob", edit)
        assert await admin.replay([event_id], "eve") == 1
        monkeypatch.setenv(TRACE_VARIABLE, "no trace")
        assert await admin.dead_letter(event_id, "ann", {"error": "no"}, "skip")
        assert await admin.discard([event_id], "ann") == 1
        lines = (await _lines(harness))[::-1]
        assert [(line.line, line.actor, line.verb) for line in lines] == [
            *((1, "ann", "dead_letter"), (2, "bob", "edit"), (3, "eve", "replay"), (4, "ann", "dead_letter")),
            (5, "ann", "discard"),
        ]
        assert {line.event_id for line in lines} == {event_id}
        assert [line.traceparent for line in lines] == [TRACE, TRACE, TRACE, None, None]
        detail = json.loads(lines[1].detail)
        assert detail["payload"]["after"] == content_digest('{"card": "4111"}')
        assert (detail["headers"], detail["topic"]) == (["x-note"], {"before": dead["topic"], "after": "others"})
        assert not any(value in line.detail for line in lines for value in ("4111", "secret"))
        report = await _verify(harness)
        assert (report.lines, report.unchained, report.findings) == (5, 0, [])

    async def test_a_command_that_changes_nothing_leaves_no_line(self, harness: Harness) -> None:
        [event_id] = await harness.stage(order(1))
        assert await harness.store.admin.replay([event_id], "ann") == 0
        assert await harness.store.admin.discard([event_id], "ann") == 0
        assert not await harness.store.admin.edit(event_id, "ann", DeadLetterEdit(topic="others"))
        assert await _lines(harness) == []
        assert (await _verify(harness)).findings == []

    async def test_commands_at_the_same_time_write_one_chain(self, harness: Harness) -> None:
        await asyncio.gather(*(_record(harness, 5, actor) for actor in ("ann", "bob", "eve")))
        assert sorted(line.line or 0 for line in await _lines(harness)) == list(range(1, 16))
        assert len(await _lines(harness, actor="bob")) == 5
        assert (await _verify(harness)).findings == []

    async def test_an_expired_dead_letter_is_a_line_of_the_maintenance(self, harness: Harness) -> None:
        staged = await harness.stage(*(order(1, f"A{n}") for n in range(3)))
        broker = MemoryBroker(script=lambda _: Rejected("no"))
        await harness.works(harness.relay(broker, on_dead_letter=OnDeadLetter.SKIP))
        await harness.advance(seconds=31 * DAY)
        assert (await harness.store.maintenance.prune(Retention(dead_letter_days=30))).dead_letters == 3
        lines = await _lines(harness, actor="maintenance")
        assert ({line.event_id for line in lines}, {line.verb for line in lines}) == (set(staged), {"expire"})
        [found] = await _lines(harness, event_id=staged[0])
        assert await _lines(harness, since=found.at, limit=1) != []
        assert (await _verify(harness)).findings == []

    async def test_old_lines_go_by_whole_days_and_the_rest_verifies(self, harness: Harness) -> None:
        log = harness.store.operations
        for _ in range(4):
            await _record(harness, 3)
            await harness.advance(seconds=DAY)
        anchors = []
        for days, left in ((10, 12), (3, 9), (3, 9), (1, 3), (0, 0)):
            await log.remove_lines(days)
            report = await _verify(harness)
            assert (report.lines, report.findings) == (left, [])
            anchors.append(await log.last_anchor())
        assert [anchor and anchor.lines for anchor in anchors] == [None, 3, 3, 9, 12]
        assert anchors[1] == anchors[2]
        await _record(harness, 1)
        assert [line.line for line in await _lines(harness)] == [13]
        assert (await _verify(harness)).findings == []

    async def test_many_old_lines_go_in_several_steps(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        await _record(harness, 25)
        await harness.advance(seconds=2 * DAY)
        module = sys.modules[type(harness.store.operations).__module__]
        monkeypatch.setattr(module, "LINES_MAX", 10)
        assert await harness.store.operations.remove_lines(1) == 25
        anchor = await harness.store.operations.last_anchor()
        assert anchor is not None
        assert (anchor.number, anchor.lines, anchor.chains) == (3, 25, 0)
        assert (await _verify(harness)).findings == []

    async def test_a_key_makes_the_hashes_and_may_be_replaced(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(KEY_VARIABLE, KEYS[0])
        await _record(harness, 2)
        monkeypatch.setenv(KEY_VARIABLE, ",".join(reversed(KEYS)))
        await _record(harness, 2)
        assert (await _verify(harness)).findings == []
        monkeypatch.setenv(KEY_VARIABLE, KEYS[1])
        assert [finding.line for finding in (await _verify(harness)).findings] == [1, 2]
        monkeypatch.delenv(KEY_VARIABLE)
        await _record(harness, 1)
        monkeypatch.setenv(KEY_VARIABLE, ",".join(KEYS))
        [finding] = (await _verify(harness)).findings
        assert (finding.line, finding.log) == (5, "operations")
        assert finding.problem == "the line has no key, and the line before has one: it was forged"
