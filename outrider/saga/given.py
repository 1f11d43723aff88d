"""What a turn is given, and what is told of it once somebody's code has proved to be at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

from outrider.saga.acting import Acted
from outrider.saga.doubt import missed
from outrider.saga.journal import OPEN, Place
from outrider.saga.merging import merged, overwritten
from outrider.saga.news import Absorb, Call, Local, Move, News, Raised, Result, Send, Succeeded
from outrider.saga_store import Entry, Note, Phase, Progress, Record


@dataclass(slots=True)
class Given:
    """What a turn is given. What proves to be at fault on the way is put in the place of what was given."""

    news: list[News] = field(default_factory=list)
    acted: list[Acted] = field(default_factory=list)
    local: Local | None = None
    leaving: Sequence[Call | Local] | None = None
    """Set when the saga is to be given back in any case: the moves that were not begun."""
    stop: str | None = None
    """Set when no turn can be taken, for that reason: the saga is stopped as failed."""
    carefully: bool = False
    """Set when something could not be staged: to find out what, each move's events are staged for themselves."""
    unread: dict[Place, Result] = field(default_factory=dict)
    unsent: dict[Place, Result] = field(default_factory=dict)

    def blame(self, move: Move, result: Result) -> None:
        """Tell this of a move, instead of making it or of what was told of it before."""
        place = move.step, move.phase
        if isinstance(move, Absorb):
            self.unread[place] = result
        elif isinstance(move, Send):
            self.unsent[place] = result
        else:
            self.local = None if move == self.local else self.local
            self.acted = [*(one for one in self.acted if one.move != move), Acted(move, result)]


def overwriting(record: Record, acted: Sequence[Acted]) -> list[Note]:
    """Return a line for the trail for each step that overwrites what another, beside it, has made of a field."""
    state, notes, instance = record.instance.state, [], record.instance
    for one in acted:
        if isinstance(one.result, Succeeded):
            if fields := overwritten(state, one.before, one.after):
                detail = f"{', '.join(fields)}: changed by another step while this one ran; this one's value is kept"
                owner = instance.owner or "worker"
                notes.append(Note(instance.status, instance.status, one.move.step, "state overwritten", owner, detail))
            state = merged(state, one.before, one.after)
    return notes


def with_states(record: Record, acted: Sequence[Acted]) -> Record:
    """Put what steps have made of the state into the record."""
    state = record.instance.state
    for one in acted:
        if isinstance(one.result, Succeeded):
            state = merged(state, one.before, one.after)
    return record._replace(instance=replace(record.instance, state=state))


def answered(journal: Sequence[Entry], move: Send) -> bool:
    """Tell whether what is to be undone has certainly happened: an event said so, and not a person."""
    return move.phase is Phase.COMPENSATION and any(
        (entry.step, entry.phase, entry.progress) == (move.step, Phase.ACTION, Progress.DONE) and entry.event_id
        for entry in journal
    )


def command_id(journal: Sequence[Entry], move: Send) -> UUID | None:
    """Return the id that the journal has for a command, by which its way can be followed."""
    return next((entry.event_id for entry in journal if (entry.step, entry.phase) == (move.step, move.phase)), None)


def _awaits(record: Record, place: Place) -> bool:
    found = (entry for entry in record.journal if (entry.step, entry.phase) == place)
    return any(entry.progress in OPEN or missed(entry) for entry in found)


def unread(given: Given, record: Record) -> list[Result]:
    """Return the news of replies that could not be taken in; of a step that begins in this turn, only that it waits."""
    return [
        result if _awaits(record, place) else Raised(*place, "its reply came early, and cannot be taken in", reply=True)
        for place, result in given.unread.items()
    ]


def owed(given: Given, record: Record) -> tuple[Result, ...]:
    """Return what can be told only when this turn is saved, since the steps begin in it."""
    early = (result for place, result in given.unread.items() if not _awaits(record, place))
    return (*early, *given.unsent.values())
