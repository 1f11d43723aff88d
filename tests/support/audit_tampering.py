"""Changes of the audit log by somebody whom no trigger and no right stops, and the findings that name them."""

from __future__ import annotations

from outrider.audit_chain import AuditCheck, read_keys
from outrider.operation_log import verify_operations
from outrider.outbox.store import OutboxStore
from outrider.saga.audit import verify
from outrider.saga.model import AuditEntry, Status
from outrider.saga.store import SagaStore
from outrider.testing.contracts import SagaBench
from outrider.testing.harness import Harness, order
from outrider.testing.saga_harness import new_saga

NOTE = AuditEntry(Status.RUNNING, Status.RUNNING, "reserve", "action done", "ann")

TAMPERING = {
    "the line, or the line before, was changed or forged": "UPDATE outrider.saga_audit_log SET actor = 'nobody'",
    "line 2 is missing, or a line was forged or moved": "DELETE FROM outrider.saga_audit_log WHERE line = 2",
    "lines 4 to 4 were removed from the end": "DELETE FROM outrider.saga_audit_log WHERE line = 4",
    "all 4 lines were removed": "DELETE FROM outrider.saga_audit_log",
    "the line belongs to no saga": "DELETE FROM outrider.saga_instance",
    "the line was forged: its saga has not written it": "INSERT INTO outrider.saga_audit_log "
    "(saga_id, line, at, new_status, what, actor, detail, hash) "
    "SELECT saga_id, 5, at, new_status, what, 'nobody', detail, hash FROM outrider.saga_audit_log WHERE line = 4",
    "the heads of the 1 chains that the anchor covers were changed or removed": "DELETE FROM outrider.saga_audit_head",
    "the anchor, or the anchor before, was changed or forged": "UPDATE outrider.saga_audit_anchor SET lines = 0",
    "anchors before this one were removed": "UPDATE outrider.saga_audit_anchor SET number = number + 1",
}
"""The SQL of each change, by the problem that the verification names."""

OPERATION_TAMPERING = {
    "the line, or the line before, was changed or forged": "UPDATE outrider.outbox_operation SET actor = 'nobody'",
    "line 4 is missing, or a line was forged or moved": "DELETE FROM outrider.outbox_operation WHERE line = 4",
    "line 3 is missing, or a line was forged or moved": "UPDATE outrider.outbox_operation SET line = line + 1",
    "lines 6 to 6 were removed from the end": "DELETE FROM outrider.outbox_operation WHERE line = 6",
    "lines 3 to 6 were removed from the end": "DELETE FROM outrider.outbox_operation",
    "the line was forged: no command has written it": "INSERT INTO outrider.outbox_operation "
    "(line, at, actor, verb, event_id, hash) "
    "SELECT 7, at, 'nobody', verb, event_id, hash FROM outrider.outbox_operation WHERE line = 6",
    "line 7 is missing, or a line was forged or moved": "INSERT INTO outrider.outbox_operation "
    "(line, at, actor, verb, event_id, hash) "
    "SELECT 6, at, 'nobody', verb, event_id, hash FROM outrider.outbox_operation WHERE line = 6",
    "1 lines have no number, and 0 are from before the chain": "INSERT INTO outrider.outbox_operation "
    "(at, actor, verb, event_id) SELECT at, 'nobody', verb, event_id FROM outrider.outbox_operation WHERE line = 6",
    "the line, or the head of the chain, was changed": "UPDATE outrider.outbox_operation_head SET hash = 'another'",
    "the head of the operation log was removed": "DELETE FROM outrider.outbox_operation_head",
    "the anchor, or the anchor before, was changed or forged": "UPDATE outrider.saga_audit_anchor SET lines = 6",
}
"""The SQL of each change of the operation log, by the problem that the verification names."""

OPERATION_REFUSED = [
    "UPDATE outrider.outbox_operation SET actor = 'nobody'",
    "DELETE FROM outrider.outbox_operation",
    "DELETE FROM outrider.outbox_operation WHERE line = 6",
    "UPDATE outrider.outbox_operation_head SET lines = lines - 1",
    "UPDATE outrider.outbox_operation_head SET unchained = unchained + 1",
    "DELETE FROM outrider.outbox_operation_head",
    OPERATION_TAMPERING["1 lines have no number, and 0 are from before the chain"],
]
"""The SQL that triggers refuse."""

DAY_SECONDS = 86_400


async def end_audited_sagas(bench: SagaBench) -> None:
    """Leave a saga that runs, with four lines, and a removed saga whose four lines are still there."""
    for correlation_id in ("gone", "runs"):
        record = await bench.start_and_claim(correlation_id)
        if correlation_id == "runs":
            await bench.save(record, notes=[NOTE] * 3)
            continue
        await bench.release(record, notes=[NOTE] * 3, status=Status.COMPLETED)
        await bench.advance(seconds=200_000)
        assert (await bench.store.prune(saga_days=1, audit_days=10, participant_memory_days=1)).sagas == 1
    assert await bench.store.admin.show(new_saga("gone").saga_id) is None


async def log_operations(harness: Harness) -> None:
    """Leave six commands, of which the first two were removed."""
    [event_id] = await harness.stage(order(1))
    for _ in range(3):
        await harness.store.admin.dead_letter(event_id, "ann", {"error": "no"}, "skip")
        await harness.store.admin.replay([event_id], "bob")
        await harness.advance(seconds=DAY_SECONDS)
    assert await harness.store.operations.remove_lines(2) == 2


async def problems(store: OutboxStore, sagas: SagaStore) -> list[str]:
    """Return what `outrider audit verify` finds in both logs."""
    check = AuditCheck(read_keys())
    found = (await verify(sagas.audit, check)).findings
    return [finding.problem for finding in found + (await verify_operations(store.operations, check)).findings]
