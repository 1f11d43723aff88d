"""The journal in the middle of a turn: what is read from it, what is written, and which moves follow.

Every change is written down once more as a note, so the audit trail is complete by construction.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from uuid import UUID, uuid5

from outrider.saga.news import Absorb, Call, Claimed, Local, Move, Send, key_of, wanted
from outrider.saga.steps import Act, Definition, Kind, Step
from outrider.saga_store import Entry, Mail, MailKind, Note, Phase, Progress, Record, Status, Undelivered

ERROR_CHARACTERS_MAX = 1000
OPEN = frozenset({Progress.INTENDED, Progress.RETRYING})
HERE = frozenset({Kind.LOCAL, Kind.CALL})
"""Kinds that a worker does itself, so that they are under way only as long as it lives."""
ANSWERED = frozenset({Kind.REQUEST, Kind.WAIT})
OUTSIDE = frozenset({Kind.CALL, Kind.REQUEST})
"""Kinds that have their effect elsewhere, so that it may have happened without anybody here knowing."""
MOVES: dict[Kind, Callable[[str, Phase, int, str], Move]] = {
    Kind.CALL: Call,
    Kind.LOCAL: Local,
    Kind.REQUEST: Send,
}

Place = tuple[str, Phase]


@dataclass(slots=True)
class Journal:
    """One saga while a turn of it is decided."""

    definition: Definition
    record: Record
    chance: random.Random
    lost: Claimed | None = None
    """Set until what a lost worker had begun is begun again."""
    unreadable: frozenset[Place] = frozenset()
    """Steps whose replies have just raised; these stay in the mailbox for this turn."""
    undelivered: Mapping[UUID, Undelivered] = field(default_factory=dict)
    """The commands, of those whose time is over, that have not left the outbox."""
    status: Status = field(init=False)
    lines: dict[Place, Entry] = field(init=False)
    changed: dict[Place, None] = field(default_factory=dict)
    taken: dict[int, None] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    last_error: str | None = field(init=False)
    retry_count: int = field(init=False)

    def __post_init__(self) -> None:
        instance = self.record.instance
        self.status, self.last_error, self.retry_count = instance.status, instance.last_error, instance.retry_count
        self.lines = {(entry.step, entry.phase): entry for entry in self.record.journal}

    @property
    def now(self) -> datetime:
        """Return the database's time, at which all of the turn happens."""
        return self.record.now

    @property
    def letters(self) -> list[Mail]:
        """Return the mail that nobody has taken yet, in the order it came."""
        return [mail for mail in self.record.mail if mail.mail_id not in self.taken]

    @property
    def begun(self) -> bool:
        """Tell whether compensation has begun. Before it, a compensation is planned at most."""
        if self.status is Status.FAILED:
            return any(entry.progress is not Progress.PLANNED for entry in self.of(Phase.COMPENSATION))
        return self.status in (Status.COMPENSATING, Status.COMPENSATED)

    @property
    def phase(self) -> Phase:
        """Return the phase the saga is in."""
        return Phase.COMPENSATION if self.begun else Phase.ACTION

    @property
    def past_pivot(self) -> bool:
        """Tell whether there is no way back."""
        pivot = self.definition.pivot
        return pivot is not None and self.stands((pivot.name, Phase.ACTION), Progress.DONE)

    @property
    def giving_up(self) -> bool:
        """Tell whether an order to compensate waits for what is out; meanwhile nothing new begins."""
        return any((mail.kind, mail.name) == (MailKind.ORDER, "compensate") for mail in self.letters)

    def of(self, phase: Phase, progress: Iterable[Progress] = Progress) -> list[Entry]:
        """Return the entries of a phase that have come so far, in the order of their places."""
        found = [entry for entry in self.lines.values() if entry.phase is phase and entry.progress in progress]
        return sorted(found, key=lambda entry: entry.place)

    def stands(self, place: Place, *progress: Progress) -> bool:
        """Tell whether there is such an entry, and whether it has come just so far."""
        entry = self.lines.get(place)
        return entry is not None and entry.progress in progress

    def step(self, entry: Entry) -> Step:
        """Return the definition of an entry's step."""
        return self.definition.steps[entry.step]

    def act(self, entry: Entry) -> Act:
        """Return what is done in the entry's phase."""
        step = self.step(entry)
        act = step.action if entry.phase is Phase.ACTION else step.undo
        assert act is not None, f"{entry.step} is being undone and has no undo"
        return act

    def kind(self, entry: Entry) -> Kind:
        """Return how the entry's phase is done: a request is undone by a request, a local function by a local one."""
        step = self.step(entry)
        if entry.phase is Phase.ACTION or step.kind is Kind.LOCAL:
            return step.kind
        return Kind.REQUEST if self.act(entry).command else Kind.CALL

    def asked_before(self, place: Place) -> bool:
        """Tell whether a step was begun in an earlier turn, so that there can be an answer to it."""
        known = (entry for entry in self.record.journal if (entry.step, entry.phase) == place)
        return any(entry.intended_at is not None for entry in known)

    def note(self, what: str, step: str | None = None, detail: str = "", actor: str | None = None) -> None:
        """Write a line for the audit trail."""
        actor = actor or self.record.instance.owner or "worker"
        self.notes.append(Note(self.status, self.status, step, what, actor, detail))

    def note_late(self, entry: Entry) -> None:
        """Write down that what a step had failed for want of has come, if it had failed."""
        if entry.progress is Progress.FAILED:
            self.note("answered after all", entry.step, f"it had failed: {entry.error}")

    def become(self, status: Status, detail: str = "") -> None:
        """Change the saga's status."""
        if status is not self.status:
            old, self.status = self.status, status
            self.note(f"became {status}", None, detail)
            self.notes[-1] = self.notes[-1]._replace(old_status=old)

    def write(self, entry: Entry, detail: str = "", what: str = "") -> None:
        """Write an entry, in place of the one before it; the trail says how far it has come, or what happened."""
        self.amend(entry)
        self.note(f"{entry.phase} {what or entry.progress}", entry.step, detail)

    def patience(self, entry: Entry) -> datetime | None:
        """Return until when an answer may take that is asked for now."""
        seconds = self.act(entry).timeout_seconds
        return None if seconds is None else self.now + timedelta(seconds=seconds)

    def amend(self, entry: Entry) -> None:
        """Write an entry that has come no further than before, which is not worth a line of the trail."""
        self.lines[entry.step, entry.phase] = entry
        self.changed[entry.step, entry.phase] = None

    def intend(self, entry: Entry) -> None:
        """Begin an attempt; the worker makes the move that follows from it."""
        attempts = entry.attempts + 1
        entry = replace(
            entry,
            progress=Progress.INTENDED,
            attempts=attempts,
            due_at=self.patience(entry),
            intended_at=entry.intended_at or self.now,
            event_id=self._command_id(entry) if self.kind(entry) is Kind.REQUEST else None,
        )
        self.write(entry, f"attempt {attempts}")
        self.retry_count += attempts > 1
        if move := MOVES.get(self.kind(entry)):
            key = key_of(self.record.instance.saga_id, entry.step)
            self.moves.append(move(entry.step, entry.phase, attempts, key))

    def _command_id(self, entry: Entry) -> UUID:
        """Name a command. The version is another in every turn, and the time in another life of the same saga."""
        instance = self.record.instance
        return uuid5(instance.saga_id, f"{entry.step} {entry.phase} {instance.version} {self.now.isoformat()}")

    def retry(self, entry: Entry, error: str) -> bool:
        """Let an attempt be made again later; False if there have been enough."""
        policy = self.act(entry).retry
        if entry.attempts >= policy.max_attempts:
            return False
        due_at = self.now + timedelta(seconds=policy.delay_seconds(max(1, entry.attempts), self.chance))
        self.last_error = error = error[:ERROR_CHARACTERS_MAX]
        self.write(replace(entry, progress=Progress.RETRYING, due_at=due_at, error=error, ended_at=None), error)
        return True

    def settle(self, entry: Entry, progress: Progress, detail: str = "", what: str = "") -> None:
        """End an entry. What failed needs a person at once, whatever else goes on."""
        detail = detail[:ERROR_CHARACTERS_MAX]
        error = None if progress is Progress.DONE else detail
        self.write(replace(entry, progress=progress, due_at=None, error=error, ended_at=self.now), detail, what)
        if progress is not Progress.DONE:
            self.last_error = detail
        if progress is Progress.FAILED:
            self.attention.append(f"{entry.phase} of {entry.step} failed: {detail}")

    def still_wanted(self) -> tuple[Move, ...]:
        """Return the moves, but for those that a later decision of the same turn has made void."""
        lines = tuple(self.lines.values())
        return tuple(move for move in self.moves if isinstance(move, Absorb) or wanted(lines, move))
