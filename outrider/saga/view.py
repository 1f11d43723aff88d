"""A saga as those see it who explain it: a record of one moment, with what is read from it more than once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from outrider.saga.graph import span
from outrider.saga.steps import Act, Definition, Kind, Step
from outrider.saga_store import Entry, Mail, Phase, Progress, Record, Status

GRACE_SECONDS = 5.0
"""A worker looks every second, so what is overdue for longer has none."""

OPEN = (Progress.INTENDED, Progress.RETRYING)
OUTSIDE = (Kind.CALL, Kind.REQUEST)


@dataclass(frozen=True, slots=True)
class View:
    """A record, and what is read from it more than once."""

    record: Record
    definition: Definition | None

    @property
    def phase(self) -> Phase:
        """Return whether the saga does or undoes. Before compensation begins, one is planned at most."""
        instance = self.record.instance
        if instance.status is Status.FAILED:
            begun = any(entry.progress is not Progress.PLANNED for entry in self.of(Phase.COMPENSATION))
            return Phase.COMPENSATION if begun else Phase.ACTION
        return Phase.COMPENSATION if instance.status is Status.COMPENSATING else Phase.ACTION

    def of(self, phase: Phase, *progress: Progress) -> list[Entry]:
        found = [e for e in self.record.journal if e.phase is phase and (not progress or e.progress in progress)]
        return sorted(found, key=lambda entry: entry.place)

    def step(self, entry: Entry) -> Step | None:
        return self.definition.steps.get(entry.step) if self.definition else None

    def act(self, entry: Entry) -> Act | None:
        if (step := self.step(entry)) is None:
            return None
        return step.action if entry.phase is Phase.ACTION else step.undo

    def stands(self, step: str | None, *progress: Progress) -> bool:
        return any(entry.step == step for entry in self.of(Phase.ACTION, *progress))

    @property
    def pivot(self) -> str | None:
        pivot = self.definition.pivot if self.definition else None
        return pivot.name if pivot else None

    @property
    def unread(self) -> list[Mail]:
        """Return mail that came after the last turn."""
        return [mail for mail in self.record.mail if mail.posted_at > self.record.instance.updated_at]

    @property
    def due_at(self) -> datetime | None:
        """Return since when somebody should have worked on it; or the end of the owner's claim, or its next time."""
        instance = self.record.instance
        times = [instance.wake_at] if instance.wake_at else []
        if instance.owner is None:
            times += [mail.posted_at for mail in self.unread]
        return min(times, default=None)

    @property
    def overdue_seconds(self) -> float:
        return (self.record.now - self.due_at).total_seconds() if self.due_at else -1.0

    @property
    def attended(self) -> bool:
        return self.record.instance.owner is not None and self.overdue_seconds < 0

    @property
    def what_runs_it(self) -> str:
        return f"version {self.record.instance.definition_version} of {self.record.instance.saga_type}"

    def at(self, moment: datetime | None) -> str:
        """Say when, by the clock on the wall and from now."""
        if moment is None:
            return "an unknown time"
        seconds = (moment - self.record.now).total_seconds()
        away = f"in {span(seconds)}" if seconds > 0 else f"{span(abs(seconds))} ago"
        return f"{moment.astimezone():%Y-%m-%d %H:%M:%S} ({away})"
