"""What a turn is worth telling: facts for the observer, made of the record before and the plan."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.observer import Fact, SagaEnded, SagaMoved, SagaNeedsAttention, SagaStepFailed
from outrider.saga.news import Plan
from outrider.saga_store import ENDED, Progress, Record

UNLUCKY = frozenset({Progress.RETRYING, Progress.REFUSED, Progress.FAILED})


def facts_of(record: Record, plan: Plan) -> Iterator[Fact]:
    """Yield what a saved turn has changed."""
    old, new = record.instance, plan.instance
    saga = new.saga_id, new.saga_type
    yield SagaMoved(*saga, new.status, new.current_step, new.retry_count)
    before = {(entry.step, entry.phase): entry for entry in record.journal}
    for entry in plan.entries:
        was = before.get((entry.step, entry.phase))
        if entry.progress in UNLUCKY and entry.error and (was is None or was.progress is not entry.progress):
            yield SagaStepFailed(*saga, entry.step, entry.phase, entry.progress, entry.attempts, entry.error)
    for reason in plan.attention:
        yield SagaNeedsAttention(*saga, new.correlation_id, reason)
    if new.status in ENDED and old.status is not new.status:
        seconds = (record.now - new.started_at).total_seconds()
        yield SagaEnded(*saga, new.correlation_id, new.status, round(seconds, 3))
