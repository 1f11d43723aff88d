"""Watches the real turns: every plan is computed twice, and every committed turn is reported with its inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch
from uuid import UUID

from outrider.redaction import ErrorText
from outrider.saga.definition.steps import Definition
from outrider.saga.execution import turn
from outrider.saga.execution.turn import UNPLANNABLE, Saved, TurnInput, TurnResult, TurnTransaction, Unplannable
from outrider.saga.model import Claim, SagaRecord, StepStatus, Uncertainty, Undelivered
from outrider.saga.planner.actions import Input, Outage, Plan
from outrider.saga.planner.journal import StepKey
from outrider.saga.planner.planner import NO_OUTAGES, NOTHING, advance

COUNTED = (StepStatus.RETRYING, StepStatus.FAILED)


class SavedInput(NamedTuple):
    """A committed turn: its claim, the saga that it read, the inputs of the planner, and the plan."""

    claim: Claim
    record: SagaRecord
    inputs: Sequence[Input]
    plan: Plan


@contextmanager
def watch_turns(saved: Callable[[SavedInput], None], fail: Callable[[str], None]) -> Iterator[None]:
    """Report every committed turn to `saved`, and every plan that depends on chance or wording to `fail`."""
    stages = TurnTransaction._stages
    planned: dict[int, tuple[SagaRecord, Sequence[Input]]] = {}
    """The inputs of each plan, by the identity of the record that was planned for."""

    def checked_advance(
        definition: Definition,
        record: SagaRecord,
        inputs: Sequence[Input],
        rng: random.Random,
        undelivered: Mapping[UUID, Undelivered] = NOTHING,
        *,
        outages: Mapping[StepKey, Outage] = NO_OUTAGES,
        error_text: ErrorText = ErrorText.REDACTED,
    ) -> Plan:
        state = rng.getstate()
        plan = advance(definition, record, inputs, rng, undelivered, outages=outages, error_text=error_text)
        reworded = record._replace(journal=tuple(replace(e, error=e.error and "reworded") for e in record.journal))
        for other in (record, reworded):
            rng.setstate(state)
            again = advance(definition, other, inputs, rng, undelivered, outages=outages, error_text=error_text)
            if decisions(again) != decisions(plan):
                fail("the same record gave two plans" if other is record else "the wording of an error decided")
        sent = [entry for entry in plan.entries if entry.command_event_id in undelivered]
        if any(entry.uncertainty is Uncertainty.OUTCOME_UNKNOWN and entry.status in COUNTED for entry in sent):
            fail("an attempt was counted for a command that had not left")
        planned[id(record)] = record, inputs
        return plan

    async def watched_stages(self: TurnTransaction, tx: Any, given: TurnInput) -> TurnResult:
        result = await stages(self, tx, given)
        if isinstance(result, Unplannable) and result.reason.startswith(UNPLANNABLE):
            fail(result.reason)
        if isinstance(result, Saved) and result.change:
            _, inputs = planned.pop(id(result.record), (None, ()))
            tx.on_commit.append(lambda: saved(SavedInput(self.claim, result.record, inputs, result.plan)))
        return result

    with patch.object(turn, "advance", checked_advance), patch.object(TurnTransaction, "_stages", watched_stages):
        yield


def decisions(plan: Plan) -> Any:
    """Return a plan without the texts that are meant for people."""
    instance = replace(plan.instance, last_error=None)
    entries = [replace(entry, error=None) for entry in plan.entries]
    return instance, entries, plan.taken, plan.seen, plan.actions, plan.release, plan.wake_seconds, len(plan.attention)
