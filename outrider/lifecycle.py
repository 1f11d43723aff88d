"""The life of an event: one table of moves.

SQL guards, the diagram, "what may follow" and the documentation page all come from MOVES. `claimed` is the state of an
event in flight in an owned lane. It is never written to a row, so a guard on it stands for the states it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where an event is."""

    PENDING = "pending"
    OPTIMISTIC = "optimistic"
    CLAIMED = "claimed"
    FAILED = "failed"
    DEFERRED = "deferred"
    PARKED = "parked"
    SENT = "sent"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True)
class Move:
    """One permitted change of state. A move without sources brings an event into the world."""

    sources: tuple[State, ...]
    target: State
    why: str


S = State
MOVES: dict[str, Move] = {
    "stage": Move((), S.PENDING, "the business transaction commits"),
    "stage_optimistic": Move((), S.OPTIMISTIC, "the writer holds the event to publish it straight after commit"),
    "claim": Move(
        (S.PENDING, S.OPTIMISTIC, S.FAILED, S.DEFERRED, S.PARKED), S.CLAIMED, "the lane's owner takes it in flight"
    ),
    "release": Move((S.CLAIMED,), S.PENDING, "the owner stops or loses its lease before a verdict"),
    "confirm": Move((S.CLAIMED,), S.SENT, "the broker has it"),
    "confirm_optimistic": Move((S.OPTIMISTIC,), S.SENT, "the broker has it from the writer"),
    "yield_optimistic": Move((S.OPTIMISTIC,), S.PENDING, "the writer leaves it to the relay"),
    "retry": Move((S.CLAIMED,), S.FAILED, "an attempt failed and is due again later"),
    "defer": Move((S.CLAIMED,), S.DEFERRED, "it is not yet due, or its destination is down"),
    "park": Move((S.CLAIMED,), S.PARKED, "it waits behind the head of its stream"),
    "bury": Move(
        (S.CLAIMED, S.PENDING, S.FAILED, S.DEFERRED, S.PARKED), S.DEAD_LETTER, "attempts are spent, or a person says so"
    ),
    "replay": Move((S.DEAD_LETTER,), S.PENDING, "a person sends it again, late"),
    "resume": Move((S.DEAD_LETTER,), S.PARKED, "a person sends it again at the head of its held stream"),
}

FETCHABLE = frozenset({S.PENDING, S.OPTIMISTIC})
"""States found from the start of a lane."""

WAITING = frozenset({S.FAILED, S.DEFERRED, S.PARKED})
"""States of a blocked stream's events, found through the stream."""

UNWRITTEN = ("claim", "release")
"""Moves that write no row: holding a lane is what claims its events."""

STORED = FETCHABLE | WAITING
"""States a row of the outbox can hold."""


def allowed(state: State) -> dict[str, State]:
    """Return what may follow: each move out of the state, with where it leads.

    >>> allowed(State.OPTIMISTIC)["confirm_optimistic"]
    <State.SENT: 'sent'>
    """
    return {name: move.target for name, move in MOVES.items() if state in move.sources}


def guard(move: str) -> tuple[State, ...]:
    """Return the stored states a row may be in when the move is written.

    >>> State.PARKED in guard("confirm")
    True
    """
    sources = MOVES[move].sources
    if State.CLAIMED not in sources:
        return sources
    return tuple(dict.fromkeys(s for source in sources for s in _stored(source)))


def _stored(state: State) -> tuple[State, ...]:
    return MOVES["claim"].sources if state is State.CLAIMED else (state,)


def stored_moves() -> list[tuple[State, State]]:
    """Return every (from, to) that a row of the outbox may make by an update; the store refuses all others."""
    written = [name for name in MOVES if name not in UNWRITTEN]
    pairs = {(source, MOVES[name].target) for name in written for source in guard(name)}
    return sorted((source, target) for source, target in pairs if source in STORED and target in STORED)


def sql_list(states: Iterable[State]) -> str:
    """Write states as a list of SQL literals.

    >>> sql_list(FETCHABLE)
    "'optimistic', 'pending'"
    """
    return ", ".join(f"'{state}'" for state in sorted(states))


def mermaid() -> str:
    """Draw the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for name, move in MOVES.items():
        lines += [f"    {source} --> {move.target}: {name}" for source in move.sources or ("[*]",)]
    lines.append(f"    {State.SENT} --> [*]")
    return "\n".join(lines)
