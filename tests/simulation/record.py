"""The history of a world: the trace of every step, every staged event, and the broker's log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from outrider.event import DeadLetterReason, Message, OnDeadLetter, OutboxRow
from outrider.stores.memory.tables import DeadRow
from tests.simulation.virtual import VirtualLoop


class Step(NamedTuple):
    """One line of the trace."""

    seconds: float
    actor: str
    verb: str
    ids: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.seconds:9.3f}  {self.actor:<10} {self.verb:<24} {' '.join(map(_plain, self.ids))}"


def _plain(part: object) -> str:
    return ":".join(map(str, part)) if isinstance(part, tuple) else str(part)


@dataclass(slots=True)
class Fate:
    """The broker's treatment of an event's message: nack it, lose the answer, or reject it until the event is cured."""

    nacks: int = 0
    lost_answers: int = 0
    poison: str = ""
    replay_when_skipped: bool = True


@dataclass(slots=True)
class Entry:
    """One staged event. Ticks count what the world did, so they tell before from after within an instant."""

    label: str
    stream: tuple[str, str, int]
    numbered: bool
    transaction: int
    index: int
    staged_tick: int
    fate: Fate
    committed_tick: int | None = None
    sequence: int | None = None


class Delivery(NamedTuple):
    """A message in the broker's log; `instead_of` names the event a marker stands for."""

    event_id: UUID
    instead_of: UUID | None
    stream: tuple[str, str]
    sequence: int | None


@dataclass(slots=True)
class Record:
    """Everything the checks will ask for."""

    loop: VirtualLoop
    trace: list[Step] = field(default_factory=list)
    entries: dict[UUID, Entry] = field(default_factory=dict)
    log: list[Delivery] = field(default_factory=list)
    skipped: dict[UUID, str] = field(default_factory=dict)
    discarded: dict[UUID, str] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)
    ticks: int = 0

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def note(self, actor: str, verb: str, ids: Sequence[object] = ()) -> None:
        self.trace.append(Step(self.loop.time(), actor, verb, tuple(ids)))

    def name(self, event_id: UUID) -> str:
        return self.entries[event_id].label

    def label(self, event: OutboxRow) -> str:
        """Name an event in the trace. A marker's own id is random, so it goes by the event it stands for."""
        if entry := self.entries.get(event.event_id):
            return entry.label
        skipped = json.loads(event.headers).get("skipped")
        return f"~{self.entries[UUID(skipped)].label}" if skipped else "?"

    def label_of(self, message: Message) -> str:
        skipped = message.headers.get("skipped")
        if skipped:
            return f"~{self.entries[UUID(skipped)].label}"
        entry = self.entries.get(UUID(message.message_id))
        return entry.label if entry else "?"

    def append(self, message: Message) -> None:
        """The broker has it."""
        skipped, sequence = message.headers.get("skipped"), message.headers.get("sequence")
        self.log.append(
            Delivery(
                UUID(message.message_id),
                UUID(skipped) if skipped else None,
                (message.topic, message.key),
                int(sequence) if sequence else None,
            )
        )


class Graveyard(dict[UUID, DeadRow]):
    """The dead letters, with every addition recorded."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __setitem__(self, event_id: UUID, dead: DeadRow) -> None:
        record, name = self._record, self._record.label(dead.row.event)
        record.note("store", f"dead-letter {dead.policy}", (name, dead.reason))
        if dead.policy == OnDeadLetter.SKIP:
            record.skipped[event_id] = name
        entry = record.entries.get(event_id)
        if dead.reason != DeadLetterReason.BY_HAND and entry is not None and not entry.fate.poison:
            record.crashes.append(f"{name} was dead-lettered, but only the network failed")
        super().__setitem__(event_id, dead)
