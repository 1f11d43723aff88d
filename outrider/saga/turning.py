"""A turn: what has happened is told to the plan, and all that follows is written in one transaction.

In it are a local function or the taking in of replies, the commands and events that are staged, and the save. Whatever
of these is at fault undoes the transaction, and the turn is taken again with that told instead; so a turn always ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from outrider.errors import ConcurrencyError, InvalidEvent, Transient
from outrider.event import Event
from outrider.saga import acting
from outrider.saga.acting import Acted
from outrider.saga.clerk import Stage
from outrider.saga.definition import Saga
from outrider.saga.handover import hand_over
from outrider.saga.journal import OPEN, Place
from outrider.saga.merging import merged
from outrider.saga.news import Absorb, Call, Local, Move, News, Plan, Raised, Result, Send, Succeeded
from outrider.saga.plan import advance
from outrider.saga_store import Claim, Record, SagaStore, Turn

T = TypeVar("T")
Lot = tuple[Move, Sequence[Event]]
"""What is staged, and the move that wants it."""


class CommittedUnheard(Exception):
    """A turn that seemed to fail was saved after all, and nobody knows what it planned."""


class Turned(NamedTuple):
    """A turn that was taken. `record` is what it began with, `turn` what was saved, if there was anything to save.

    `owed` is to be told in the next turn, at once.
    """

    record: Record
    plan: Plan
    turn: Turn | None = None
    owed: tuple[Result, ...] = ()


class _AtFault(Exception):
    """Somebody's code spoils the turn."""


@dataclass(slots=True)
class Given:
    """What a turn is given. What proves to be at fault on the way is put in the place of what was given."""

    news: list[News] = field(default_factory=list)
    acted: list[Acted] = field(default_factory=list)
    local: Local | None = None
    leaving: Sequence[Call | Local] | None = None
    """Set when the saga is to be given back in any case: the moves that were not begun."""
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


@dataclass(slots=True)
class Turning:
    """Takes the turns of one saga, as long as it is claimed."""

    store: SagaStore
    stage: Stage
    saga: Saga[Any]
    claim: Claim
    version: int | None
    """The one that must be stored; None if whatever is found will do."""
    lease_seconds: float
    chance: random.Random
    seen: frozenset[int] = frozenset()

    async def take(self, given: Given, record: Record | None = None) -> Turned:
        """Take a turn, with a record that was just read or with one that is read in the transaction."""
        turned = await self._committed(replace(given, unread={}, unsent={}), record)
        if turned.turn:
            self.version = turned.record.instance.version + 1
            self.seen = frozenset(turned.plan.seen)
        return turned

    async def _committed(self, given: Given, record: Record | None) -> Turned:
        while True:
            try:
                async with self.store.transaction() as tx:
                    return await self._take(tx, given, record)
            except _AtFault:
                continue
            except (Transient, CommittedUnheard):
                raise
            except Exception as error:
                # What cannot be saved after a local function was spoilt by it: a row that breaks a rule, for instance.
                if (spoilt := given.local) is None:
                    raise
                given.blame(spoilt, Raised(spoilt.step, spoilt.phase, str(error)))

    async def _take(self, tx: Any, given: Given, record: Record | None) -> Turned:
        record = record or await self._load(tx, lock=given.local is not None)
        acted = list(given.acted)
        if given.local:
            acted.append(await self._run_local(tx, given, record))
        record = _with_states(record, acted)
        news = [*given.news, *(one.result for one in acted), *_unread(given, record)]
        plan = advance(self.saga.definition, record, news, self.chance)
        if given.leaving is not None:
            plan = hand_over(plan, record, given.leaving)
        owed = _owed(given, record)
        if self._quiet(record, plan, owed):
            return Turned(record, plan)
        return Turned(record, plan, await self._write(tx, given, record, plan, acted), owed)

    async def _load(self, tx: Any, *, lock: bool) -> Record:
        record = held(await self.store.load(tx, self.claim.saga_id, for_update=lock), self.claim)
        if self.version not in (None, record.instance.version):
            raise CommittedUnheard
        return record

    async def _run_local(self, tx: Any, given: Given, record: Record) -> Acted:
        assert given.local
        acted = await acting.local(self.store, self.saga, record.instance, given.local, tx)
        if not isinstance(acted.result, Succeeded):
            given.blame(given.local, acted.result)
            raise _AtFault
        return acted

    async def _write(self, tx: Any, given: Given, record: Record, plan: Plan, acted: Sequence[Acted]) -> Turn:
        """Save a turn, and stage what goes out with it."""
        lots: list[Lot] = [(one.move, one.staged) for one in acted]
        instance = plan.instance
        for move in plan.moves:
            match move:
                case Absorb():
                    taken = _fine(acting.absorb(self.saga, instance, move), given.unread)
                    instance = replace(instance, state=taken.state)
                    lots.append((move, taken.staged))
                case Send() if (move.step, move.phase) not in given.unsent:
                    lots.append((move, (_fine(acting.command(self.saga, instance, move), given.unsent),)))
        release = plan.release and not _owed(given, record)
        turn = Turn(instance, plan.entries, plan.taken, plan.seen, plan.notes, release, plan.wake_seconds)
        await self.store.save(tx, self.claim, turn, self.lease_seconds)
        traced = [(move, [acting.traced(event, instance) for event in events]) for move, events in lots if events]
        await self._stage(tx, given, traced)
        return turn

    async def _stage(self, tx: Any, given: Given, lots: Sequence[Lot]) -> None:
        """Stage everything at once; if something cannot be, find out whose it is."""
        try:
            if lots:
                await self.stage(tx, *(event for _, events in lots for event in events))
        except InvalidEvent:
            for move, events in lots:
                try:
                    await self.stage(tx, *events)
                except InvalidEvent as error:
                    given.blame(move, acting.unfit(move, error))
                    raise _AtFault from error

    def _quiet(self, record: Record, plan: Plan, owed: Sequence[Result]) -> bool:
        """Tell whether nothing has happened, so that there is nothing to save."""
        changes = plan.entries or plan.notes or plan.taken or plan.moves or plan.release or owed
        return not changes and plan.instance == record.instance and self.seen.issuperset(plan.seen)


def held(record: Record | None, claim: Claim) -> Record:
    """Return what was read, if the claim still holds."""
    if record is None or (record.instance.owner, record.instance.epoch) != (claim.worker, claim.epoch):
        raise ConcurrencyError(f"saga {claim.saga_id} has another owner by now; nothing was written: claim it again")
    return record


def _fine(made: T | Result, blamed: dict[Place, Result]) -> T:
    """Return what was made; if it could not be, put the blame for it down."""
    if isinstance(made, Result):
        blamed[made.step, made.phase] = made
        raise _AtFault
    return made


def _with_states(record: Record, acted: Sequence[Acted]) -> Record:
    """Put what steps have made of the state into the record."""
    state = record.instance.state
    for one in acted:
        if isinstance(one.result, Succeeded):
            state = merged(state, one.before, one.after)
    return record._replace(instance=replace(record.instance, state=state))


def _awaits(record: Record, place: Place) -> bool:
    return any((entry.step, entry.phase) == place and entry.progress in OPEN for entry in record.journal)


def _unread(given: Given, record: Record) -> list[Result]:
    """Return the news of replies that could not be taken in; of a step that begins in this turn, only that it waits."""
    return [
        result if _awaits(record, place) else Raised(*place, "its reply came early, and cannot be taken in")
        for place, result in given.unread.items()
    ]


def _owed(given: Given, record: Record) -> tuple[Result, ...]:
    """Return what can be told only when this turn is saved, since the steps begin in it."""
    early = (result for place, result in given.unread.items() if not _awaits(record, place))
    return (*early, *given.unsent.values())
