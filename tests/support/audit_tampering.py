"""Changes of the audit log by somebody whom no trigger and no right stops, and the findings that name them."""

from __future__ import annotations

from outrider.saga.model import AuditEntry, Status
from outrider.testing.contracts import SagaBench
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
