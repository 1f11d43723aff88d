"""What a worker tells the plan, and what the plan tells the worker. Values only.

A move is given out once. A worker that still has one to do asks `wanted` first, since an order may have come between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from outrider.saga_store import Entry, Instance, Mail, Note, Phase, Progress


def key_of(saga_id: UUID, step: str) -> str:
    """Return the idempotency key of a step: the same for every attempt, and for its compensation.

    >>> key_of(UUID(int=7), "reserve")
    '00000000-0000-0000-0000-000000000007:reserve'
    """
    return f"{saga_id}:{step}"


class Claimed(NamedTuple):
    """The saga has just been claimed: nothing of it is under way here, whatever its journal says.

    `begun` are the attempts that may have been begun, if the worker knows them since it had the saga before; whatever
    else the journal intends costs no attempt then.
    """

    begun: frozenset[tuple[str, Phase, int]] | None = None


class Succeeded(NamedTuple):
    """A call or a local function returned."""

    step: str
    phase: Phase


class Declined(NamedTuple):
    """It said that it did not happen and will not."""

    step: str
    phase: Phase
    error: str


class Raised(NamedTuple):
    """It raised; with `reply`, it is a reply that could not be taken into the state.

    That reply is then left in the mailbox for this turn. Of a step that begins in this very turn it must be told once
    more in the next one, without a release between: the plan cannot charge an attempt before the step has begun.
    """

    step: str
    phase: Phase
    error: str
    reply: bool = False


class TimedOut(NamedTuple):
    """It did not return in time; whether it happened is unknown."""

    step: str
    phase: Phase


class Unfit(NamedTuple):
    """What it did cannot be recorded, or the state cannot be read: the code is at fault, and only a person can help."""

    step: str
    phase: Phase
    error: str


Result = Succeeded | Declined | Raised | TimedOut | Unfit
News = Claimed | Result


class Call(NamedTuple):
    """Call the function outside any transaction, after this turn is saved."""

    step: str
    phase: Phase
    attempt: int
    key: str


class Local(NamedTuple):
    """Run the function in a transaction of its own, after this turn is saved; save its result in the same one."""

    step: str
    phase: Phase
    attempt: int
    key: str


class Send(NamedTuple):
    """Stage the command in the transaction that saves this turn."""

    step: str
    phase: Phase
    attempt: int
    key: str


class Absorb(NamedTuple):
    """Take a reply into the state, in the transaction that saves this turn and before what follows is sent."""

    step: str
    phase: Phase
    mail: Mail
    attempt: int = 1


Move = Call | Local | Send | Absorb


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn to be saved, and what to do. `instance.version` is the one expected in the store.

    `taken`, `seen`, `notes`, `release` and `wake_seconds` are those of a `Turn`. Without `release`, something is under
    way here, and the plan is to be asked again after `wake_seconds`, or when there is news. `attention` says why a
    person must look, once for each reason.
    """

    instance: Instance
    entries: tuple[Entry, ...] = ()
    taken: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()
    moves: tuple[Move, ...] = ()
    release: bool = False
    wake_seconds: float | None = None
    attention: tuple[str, ...] = ()


def wanted(journal: Iterable[Entry], move: Call | Local | Send) -> bool:
    """Tell whether a move is still to be made: its step is being done, in that phase and that attempt.

    >>> move = Call("charge", Phase.ACTION, 2, "key")
    >>> wanted([Entry("charge", Phase.ACTION, Progress.INTENDED, place=1, attempts=2)], move)
    True
    >>> wanted([Entry("charge", Phase.ACTION, Progress.FAILED, place=1, attempts=2)], move)
    False
    """
    return any(
        (entry.step, entry.phase, entry.attempts) == (move.step, move.phase, move.attempt)
        and entry.progress is Progress.INTENDED
        for entry in journal
    )
