"""The journal during a turn: reads entries, writes entries and collects actions.

Each change also adds an audit entry, so the audit log is complete by construction.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

from outrider.redaction import ErrorText, Redactor
from outrider.saga.definition.children import CALL_OFF, PARENT_STEP
from outrider.saga.definition.steps import Definition, Step, StepAction, StepKind, base_name
from outrider.saga.model import (
    PASSED,
    AuditEntry,
    JournalEntry,
    MessageKind,
    NewSaga,
    NewSagaMessage,
    Phase,
    SagaMessage,
    SagaRecord,
    Status,
    StepStatus,
    Uncertainty,
    Undelivered,
)
from outrider.saga.planner.actions import (
    Action,
    ApplyReply,
    CallAction,
    Claimed,
    LocalAction,
    Outage,
    SendCommand,
    key_of,
    wanted,
)
from outrider.tracebacks import text_of

ERROR_CHARACTERS_MAX = 1000

BELIEVED = "the rejection is believed to speak for that attempt too: it had no effect, and will have none"
DOUBTS = {
    Uncertainty.OUTCOME_UNKNOWN: f"; the outcome of an earlier attempt was unknown; {BELIEVED}",
    Uncertainty.RAISED: f"; an earlier attempt ended with an error, and may have happened; {BELIEVED}",
}
"""The parts of an audit entry that say which claim of a participant the saga relies on."""

OPEN = frozenset({StepStatus.STARTED, StepStatus.RETRYING})

HERE = frozenset({StepKind.LOCAL, StepKind.CALL})
"""Kinds that a worker executes itself; they run only while the worker is alive."""

ANSWERED = frozenset({StepKind.REQUEST, StepKind.WAIT})

OUTSIDE = frozenset({StepKind.CALL, StepKind.REQUEST, StepKind.CHILD})
"""Kinds with an effect outside of the saga, which may have happened without a record here."""

ACTIONS: dict[StepKind, Callable[[str, Phase, int, str], Action]] = {
    StepKind.CALL: CallAction,
    StepKind.LOCAL: LocalAction,
    StepKind.REQUEST: SendCommand,
}

StepKey = tuple[str, Phase]


@dataclass(slots=True)
class Journal:
    """The working copy of a saga during the planning of a turn."""

    definition: Definition
    record: SagaRecord
    rng: random.Random
    lost: Claimed | None = None
    """Set until the interrupted steps of a lost worker are restarted."""
    unreadable: frozenset[StepKey] = frozenset()
    """Steps whose replies have just raised. The replies stay in the mailbox during this turn."""
    undelivered: Mapping[UUID, Undelivered] = field(default_factory=dict)
    """Commands that have not left the outbox at their deadline."""
    outages: Mapping[StepKey, Outage] = field(default_factory=dict)
    """Steps that are not tried now, because their service is unavailable."""
    error_text: ErrorText = ErrorText.REDACTED
    """The part of the reasons of participants that is kept."""
    probed: set[StepKey] = field(default_factory=set)
    """Steps of which this turn starts the one attempt that probes their service."""
    status: Status = field(init=False)
    lines: dict[StepKey, JournalEntry] = field(init=False)
    changed: dict[StepKey, None] = field(default_factory=dict)
    taken: dict[int, None] = field(default_factory=dict)
    notes: list[AuditEntry] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    children: list[NewSaga] = field(default_factory=list)
    messages: list[NewSagaMessage] = field(default_factory=list)
    """The children to be started, and the messages to other sagas."""
    last_error: str | None = field(init=False)
    retry_count: int = field(init=False)
    losses: int = field(init=False)
    base: Definition = field(init=False)
    """The definition as written. `definition` also has the items of the lists in the journal, as steps."""
    pivot: Step | None = field(init=False)
    is_undecided: bool = False
    """Whether a condition or a list waits for the next turn, because this turn still applies replies to the state."""

    def __post_init__(self) -> None:
        instance = self.record.instance
        self.status, self.last_error, self.retry_count = instance.status, instance.last_error, instance.retry_count
        self.losses = instance.losses
        self.lines = {(entry.step, entry.phase): entry for entry in self.record.journal}
        self.base = self.definition
        self.expand()

    def text_of(self, error: BaseException) -> str:
        """Return the part of the text of an error that may be written."""
        return text_of(error, Redactor(self.error_text, self.record.instance.state))

    def expand(self) -> None:
        """Add the items of the lists in the journal to the steps, and the last wait of a child."""
        self.definition = self.base.expanded(self.lines.values(), is_child=self.is_child)
        self.pivot = self.definition.pivot

    @property
    def now(self) -> datetime:
        """Return the database time, which is the time of the whole turn."""
        return self.record.now

    @property
    def unread(self) -> list[SagaMessage]:
        """Return the messages that are not yet taken, in order of arrival."""
        return [message for message in self.record.messages if message.message_id not in self.taken]

    @property
    def is_child(self) -> bool:
        """Tell whether another saga has started this saga and waits for its outcome."""
        return self.record.instance.parent_id is not None

    @property
    def awaits_parent(self) -> bool:
        """Tell whether all steps of a child are done, and the child waits for the end of its parent."""
        return self.has_status((PARENT_STEP, Phase.ACTION), StepStatus.STARTED)

    @property
    def is_relied_on(self) -> bool:
        """Tell whether all steps of a child are done, and its parent has not begun to compensate them."""
        return self.has_status((PARENT_STEP, Phase.ACTION), StepStatus.STARTED, StepStatus.DONE)

    @property
    def is_compensating(self) -> bool:
        """Tell whether compensation has started. Before the start, compensations are at most planned."""
        if self.status is Status.FAILED:
            return any(entry.status is not StepStatus.PLANNED for entry in self.entries(Phase.COMPENSATION))
        return self.status in (Status.COMPENSATING, Status.COMPENSATED)

    @property
    def phase(self) -> Phase:
        """Return the current phase of the saga."""
        return Phase.COMPENSATION if self.is_compensating else Phase.ACTION

    @property
    def is_overdue(self) -> bool:
        """Tell whether the deadline of the saga has passed while the saga runs forward."""
        deadline_at = self.record.instance.deadline_at
        is_forward = self.status in (Status.STARTED, Status.RUNNING) and not self.awaits_parent
        return is_forward and deadline_at is not None and deadline_at <= self.now

    @property
    def past_pivot(self) -> bool:
        """Tell whether the pivot is done or skipped, so the saga can no longer compensate."""
        return self.pivot is not None and self.has_status((self.pivot.name, Phase.ACTION), *PASSED)

    @property
    def has_passed_all(self) -> bool:
        """Tell whether every step is done or skipped."""
        return all(self.has_status((step, Phase.ACTION), *PASSED) for step in self.definition.steps)

    @property
    def has_done_all(self) -> bool:
        """Tell whether only the last wait of a child is still to begin."""
        missing = [name for name in self.definition.steps if not self.has_status((name, Phase.ACTION), *PASSED)]
        return missing == [PARENT_STEP] and not self.awaits_parent

    @property
    def compensation_requested(self) -> bool:
        """Tell whether a compensate command waits for open steps. Meanwhile no new step starts."""
        return any((message.kind, message.name) == (MessageKind.OPERATOR, "compensate") for message in self.unread)

    @property
    def is_called_off(self) -> bool:
        """Tell whether the parent is going to compensate, and so the child compensates before its pivot."""
        commands = (message.name for message in self.unread if message.kind is MessageKind.OPERATOR)
        return not self.awaits_parent and CALL_OFF in commands

    def entries(self, phase: Phase, status: Iterable[StepStatus] = StepStatus) -> list[JournalEntry]:
        """Return the entries of a phase with the given statuses, ordered by position."""
        found = [entry for entry in self.lines.values() if entry.phase is phase and entry.status in status]
        return sorted(found, key=lambda entry: entry.position)

    def has_status(self, step_key: StepKey, *status: StepStatus) -> bool:
        """Tell whether the entry exists and has one of the statuses."""
        entry = self.lines.get(step_key)
        return entry is not None and entry.status in status

    def step(self, entry: JournalEntry) -> Step:
        """Return the definition of the step of an entry."""
        return self.definition.steps[entry.step]

    def action(self, entry: JournalEntry) -> StepAction:
        """Return the step action for the phase of an entry."""
        step = self.step(entry)
        action = step.action if entry.phase is Phase.ACTION else step.compensation
        assert action is not None, f"{entry.step} is being compensated and has no compensation"
        return action

    def kind(self, entry: JournalEntry) -> StepKind:
        """Return the kind of an entry's phase: a request compensates by a request, a local step by a local function."""
        step = self.step(entry)
        if entry.phase is Phase.ACTION or step.kind in (StepKind.LOCAL, StepKind.CHILD):
            return step.kind
        return StepKind.REQUEST if self.action(entry).command else StepKind.CALL

    def was_started_before(self, step_key: StepKey) -> bool:
        """Tell whether a step was started in an earlier turn, so that a reply is possible."""
        known = (entry for entry in self.record.journal if (entry.step, entry.phase) == step_key)
        return any(entry.started_at is not None for entry in known)

    def note(self, what: str, step: str | None = None, detail: str = "", actor: str | None = None) -> None:
        """Add an audit entry."""
        actor = actor or self.record.instance.owner or "worker"
        self.notes.append(AuditEntry(self.status, self.status, step, what, actor, detail))

    def audit_late_reply(self, entry: JournalEntry) -> None:
        """Add an audit entry for a late reply to a failed step."""
        if entry.status is StepStatus.FAILED:
            self.note("answered after all", entry.step, f"it had failed: {entry.error}")

    def set_status(self, status: Status, detail: str = "") -> None:
        """Change the status of the saga."""
        if status is not self.status:
            old, self.status = self.status, status
            self.note(f"became {status}", None, detail)
            self.notes[-1] = self.notes[-1]._replace(old_status=old)

    def write(self, entry: JournalEntry, detail: str = "", what: str = "") -> None:
        """Write an entry and an audit entry with the new status, or with `what`."""
        self.update(entry)
        self.note(f"{entry.phase} {what or entry.status}", entry.step, detail)

    def deadline(self, entry: JournalEntry) -> datetime | None:
        """Return the deadline of a step that starts now, or None."""
        seconds = self.action(entry).timeout_seconds
        return None if seconds is None else self.now + timedelta(seconds=seconds)

    def update(self, entry: JournalEntry) -> None:
        """Write an entry whose progress is unchanged, without an audit entry."""
        self.lines[entry.step, entry.phase] = entry
        self.changed[entry.step, entry.phase] = None

    def start(self, entry: JournalEntry, detail: str = "") -> None:
        """Start an attempt, and add the action for the worker. During an outage, the step waits for its service."""
        place = base_name(entry.step), entry.phase
        outage = self.outages.get(place)
        if outage and self.kind(entry) in HERE:
            if not outage.allows_probe or place in self.probed:
                return self.wait_for_service(entry, outage)
            self.probed.add(place)
        attempts = entry.attempts + 1
        entry = replace(
            entry,
            status=StepStatus.STARTED,
            attempts=attempts,
            due_at=self.deadline(entry),
            started_at=entry.started_at or self.now,
            # A new command is sent, so the reply to the previous command is no longer expected.
            uncertainty=None if entry.uncertainty is Uncertainty.REPLY_NOT_APPLIED else entry.uncertainty,
            undelivered=None,
            command_event_id=self.command_id(entry) if self._sends_command(entry) else None,
            reply_event_id=None,
        )
        self.write(entry, f"attempt {attempts}{detail}")
        self.retry_count += attempts > 1
        if action := ACTIONS.get(self.kind(entry)):
            key = key_of(self.record.instance.saga_id, entry.step)
            made = action(entry.step, entry.phase, attempts, key)
            if (item := self.step(entry).item) is not None and not isinstance(made, ApplyReply):
                made = made._replace(item=item, result=self.lines[entry.step, Phase.ACTION].data)
            self.actions.append(made)
        return None

    def wait_for_service(self, entry: JournalEntry, outage: Outage) -> None:
        """Schedule the next look at an unavailable service, at no cost; after the step's limit, the step fails.

        The wait doubles with the time that has passed, up to the cap of the retry policy.
        """
        action, since = self.action(entry), entry.unavailable_since or self.now
        error, limit = outage.error, since + timedelta(seconds=action.unavailable_for_seconds)
        if self.now >= limit:
            error = f"the service has been unavailable since {since:%Y-%m-%d %H:%M:%S} UTC: {error}"
            return self.settle(entry, StepStatus.FAILED, error, uncertainty=entry.uncertainty)
        retry, passed_seconds = action.retry, (self.now - since).total_seconds()
        pause_seconds = min(retry.cap_seconds, max(retry.base_seconds, passed_seconds * (retry.factor - 1)))
        pause_seconds *= self.rng.uniform(1 - retry.jitter, 1 + retry.jitter)
        # The service or the circuit breaker has named a time, so the jitter only adds.
        asked_seconds = min(outage.seconds * self.rng.uniform(1, 1 + retry.jitter), action.unavailable_for_seconds)
        due_at = min(limit, self.now + timedelta(seconds=max(pause_seconds, asked_seconds)))
        self.last_error = error = error[:ERROR_CHARACTERS_MAX]
        waiting = replace(entry, due_at=due_at, error=error, unavailable_since=since, undelivered=None)
        waiting = replace(waiting, status=StepStatus.RETRYING)
        if entry.status is StepStatus.RETRYING and entry.unavailable_since:
            # The step was waiting already. A line for each look would fill the audit log during a long outage.
            return self.update(waiting)
        return self.write(waiting, error, "waits for its service")

    def repeat(self, entry: JournalEntry, detail: str) -> None:
        """Start the same attempt again, at no cost."""
        self.retry_count -= entry.attempts > 1
        self.start(replace(entry, attempts=entry.attempts - 1), f", again: {detail}")

    def _sends_command(self, entry: JournalEntry) -> bool:
        """Tell whether a step starts with a command. A child is started instead, and gets its commands later."""
        kind = self.kind(entry)
        return kind is StepKind.REQUEST or (kind is StepKind.CHILD and entry.phase is Phase.COMPENSATION)

    def command_id(self, entry: JournalEntry) -> UUID:
        """Return a new id for a command.

        The version differs per turn; the time differs if the same saga is started anew.
        """
        instance = self.record.instance
        return uuid5(instance.saga_id, f"{entry.step} {entry.phase} {instance.version} {self.now.isoformat()}")

    def set_fields(self, fields: Mapping[str, Any]) -> None:
        """Set fields of the state. Raises InvalidState for values that do not fit."""
        if fields and self.definition.set_fields:
            instance = self.record.instance
            state = self.definition.set_fields(instance.state, fields)
            self.record = self.record._replace(instance=replace(instance, state=state))

    def retry(self, entry: JournalEntry, error: str, uncertainty: Uncertainty | None = None) -> bool:
        """Schedule another attempt; False if the attempts are used up."""
        policy = self.action(entry).retry
        if entry.attempts >= policy.max_attempts:
            return False
        due_at = self.now + timedelta(seconds=policy.delay_seconds(max(1, entry.attempts), self.rng))
        self.last_error = error = error[:ERROR_CHARACTERS_MAX]
        retrying = replace(entry, status=StepStatus.RETRYING, due_at=due_at, error=error, unavailable_since=None)
        retrying = replace(retrying, ended_at=None)
        self.write(replace(retrying, uncertainty=uncertainty, undelivered=None), error)
        return True

    def settle(
        self,
        entry: JournalEntry,
        status: StepStatus,
        detail: str = "",
        what: str = "",
        uncertainty: Uncertainty | None = None,
        *,
        doubt: str = "",
    ) -> None:
        """End an entry. A failed entry needs an operator immediately, even while other steps continue."""
        detail = detail[:ERROR_CHARACTERS_MAX]
        error = None if status in PASSED else detail
        settled = replace(
            entry,
            status=status,
            due_at=None,
            error=error,
            ended_at=self.now,
            uncertainty=uncertainty,
            undelivered=None,
            unavailable_since=None,
        )
        self.write(settled, detail + doubt, what)
        if status not in PASSED:
            self.last_error = detail
        if status is StepStatus.FAILED:
            self.attention.append(f"{entry.phase} of {entry.step} failed: {detail}")

    def reject(self, entry: JournalEntry, error: str) -> None:
        """End a step that declined. The audit entry says so if the outcome of an earlier attempt is in doubt."""
        doubt = DOUBTS.get(entry.uncertainty, "") if entry.uncertainty else ""
        self.settle(entry, StepStatus.REJECTED, error, doubt=doubt)

    def remaining_actions(self) -> tuple[Action, ...]:
        """Return the actions that no later decision of the same turn has made obsolete."""
        lines = tuple(self.lines.values())
        return tuple(action for action in self.actions if isinstance(action, ApplyReply) or wanted(lines, action))
