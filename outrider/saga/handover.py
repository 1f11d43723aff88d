"""Giving a saga back in the middle: what was planned and not begun is left to the next worker, and costs no attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.saga.news import Call, Local, Plan, wanted
from outrider.saga_store import Note, Progress, Record


def hand_over(plan: Plan, record: Record, unbegun: Sequence[Call | Local]) -> Plan:
    """Return the plan of a turn that gives the saga back, due at once. What is under way will be begun again."""
    if plan.release:
        return plan
    lines = {(entry.step, entry.phase): entry for entry in (*record.journal, *plan.entries)}
    changed = {(entry.step, entry.phase): entry for entry in plan.entries}
    notes, again = list(plan.notes), 0
    for move in (*unbegun, *plan.moves):
        place = move.step, move.phase
        if isinstance(move, Call | Local) and wanted([lines[place]], move):
            left = replace(lines[place], progress=Progress.RETRYING, attempts=move.attempt - 1, due_at=record.now)
            lines[place] = changed[place] = left
            status, actor = plan.instance.status, record.instance.owner or "worker"
            notes.append(Note(status, status, move.step, f"{move.phase} handed over", actor, "not begun"))
            again += move.attempt > 1
    instance = replace(plan.instance, retry_count=plan.instance.retry_count - again)
    return replace(
        plan,
        instance=instance,
        entries=tuple(changed.values()),
        notes=tuple(notes),
        moves=tuple(move for move in plan.moves if not isinstance(move, Call | Local)),
        release=True,
        wake_seconds=0.0,
    )
