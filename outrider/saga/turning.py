"""A turn: what has happened is told to the plan, and all that follows is written in one transaction.

In it are a local function or the taking in of replies, the commands and events that are staged, and the save. Whatever
of these is at fault undoes the transaction, and the turn is taken again with that told instead; so a turn always ends.
Where nothing can be told, the saga is stopped: that can always be saved.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from outrider.clock import Clock
from outrider.errors import ConcurrencyError, InvalidEvent, Transient
from outrider.event import Event
from outrider.saga import acting
from outrider.saga.acting import Acted, Acting
from outrider.saga.clerk import Stage
from outrider.saga.faults import RAISED, described
from outrider.saga.given import Given, answered, command_id, overwriting, owed, unread, with_states
from outrider.saga.handover import hand_over
from outrider.saga.journal import Place
from outrider.saga.news import Absorb, Move, Plan, Result, Send, Succeeded
from outrider.saga.plan import advance, overdue
from outrider.saga.stopping import stopped
from outrider.saga_store import Claim, Instance, Record, SagaStore, Turn, Undelivered

T = TypeVar("T")
Lot = tuple[Move, Sequence[Event]]
"""What is staged, and the move that wants it."""

UNCOMPUTABLE = "no turn of it can be computed, which is a fault of its definition, its state or this program"


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


class _Uncomputable(Exception):
    """The plan itself fails."""


@dataclass(slots=True)
class Turning:
    """Takes the turns of one saga, as long as it is claimed."""

    store: SagaStore
    stage: Stage
    acting: Acting
    claim: Claim
    version: int | None
    """The one that must be stored; None if whatever is found will do."""
    lease_seconds: float
    chance: random.Random
    clock: Clock
    seen: frozenset[int] = frozenset()
    entered: bool = False
    """Whether a local function was begun in the last turn."""
    saved_at: float = float("-inf")
    """When this worker last asked for a save, by its own clock; what was saved lasts a lease from then on at least."""

    async def take(self, given: Given, record: Record | None = None) -> Turned:
        """Take a turn, with a record that was just read or with one that is read in the transaction."""
        self.entered = False
        turned = await self._committed(replace(given, unread={}, unsent={}), record)
        if turned.turn:
            self.version = turned.record.instance.version + 1
            self.seen = frozenset(turned.plan.seen)
        return turned

    async def _committed(self, given: Given, record: Record | None) -> Turned:
        while True:
            try:
                async with self._transaction(given) as tx:
                    return await self._take(tx, given, record)
            except _AtFault:
                continue
            except (Transient, CommittedUnheard):
                raise
            except _Uncomputable as error:
                given.stop = f"{UNCOMPUTABLE}: {described(error.__cause__ or error)}"
            except RAISED as error:
                # What cannot be saved after a local function was spoilt by it: a row that breaks a rule, for instance.
                if (spoilt := given.local) is None:
                    raise
                given.blame(spoilt, self.acting.spoilt(spoilt, error))

    def _transaction(self, given: Given) -> AbstractAsyncContextManager[Any]:
        return self.store.lend() if given.local else self.store.transaction()

    async def _take(self, tx: Any, given: Given, record: Record | None) -> Turned:
        record = record or await self._load(tx, lock=given.local is not None)
        acted = list(given.acted)
        if given.stop is not None:
            return await self._stop(tx, record, given.stop)
        late = overdue(record)
        undelivered = await self.store.undelivered(tx, late) if late else {}
        if given.local:
            acted.append(await self._run_local(tx, given, record))
        record, plan = self._planned(given, record, acted, undelivered)
        debts = owed(given, record)
        if self._quiet(record, plan, debts):
            return Turned(record, plan)
        return Turned(record, plan, await self._write(tx, given, record, plan, acted), debts)

    def _planned(
        self, given: Given, record: Record, acted: Sequence[Acted], undelivered: Mapping[UUID, Undelivered]
    ) -> tuple[Record, Plan]:
        try:
            clashes, record = overwriting(record, acted), with_states(record, acted)
            news = [*given.news, *(one.result for one in acted), *unread(given, record)]
            plan = advance(self.acting.saga.definition, record, news, self.chance, undelivered)
            plan = replace(plan, notes=(*clashes, *plan.notes)) if clashes else plan
            return record, plan if given.leaving is None else hand_over(plan, record, given.leaving)
        except RAISED as error:
            raise _Uncomputable from error

    async def _stop(self, tx: Any, record: Record, reason: str) -> Turned:
        plan = stopped(record, reason)
        turn = Turn(plan.instance, (), plan.taken, plan.seen, plan.notes, plan.release)
        await self._save(tx, turn)
        return Turned(record, plan, turn)

    async def _load(self, tx: Any, *, lock: bool) -> Record:
        record = held(await self.store.load(tx, self.claim.saga_id, for_update=lock), self.claim)
        if self.version not in (None, record.instance.version):
            raise CommittedUnheard
        return record

    async def _run_local(self, tx: Any, given: Given, record: Record) -> Acted:
        assert given.local
        self.entered = True
        acted = await self.acting.local(record.instance, given.local, tx)
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
                    taken = _fine(self.acting.absorb(instance, move), given.unread)
                    instance = replace(instance, state=taken.state)
                    lots.append((move, taken.staged))
                case Send() if (move.step, move.phase) not in given.unsent:
                    happened = answered((*record.journal, *plan.entries), move)
                    asked = _fine(self.acting.command(instance, move, answered=happened), given.unsent)
                    lots.append((move, (replace(asked, event_id=command_id(plan.entries, move)),)))
        release = plan.release and not owed(given, record)
        turn = Turn(instance, plan.entries, plan.taken, plan.seen, plan.notes, release, plan.wake_seconds)
        await self._save(tx, turn)
        await self._stage_all(tx, given, instance, [lot for lot in lots if lot[1]])
        return turn

    async def _save(self, tx: Any, turn: Turn) -> None:
        self.saved_at = self.clock.boot_seconds()
        await self.store.save(tx, self.claim, turn, self.lease_seconds)

    async def _stage_all(self, tx: Any, given: Given, instance: Instance, lots: Sequence[Lot]) -> None:
        """Stage everything at once; if something cannot be, find out whose it is."""
        if not lots:
            return None
        try:
            if given.carefully:
                return await self._stage_each(tx, given, instance, lots)
            await self._stage(tx, instance, [event for _, events in lots for event in events])
        except InvalidEvent:
            # It was refused before anything was written, so the transaction is as good as before.
            await self._stage_each(tx, given, instance, lots)
        except (Transient, _AtFault):
            raise
        except RAISED as error:
            given.carefully = True
            raise _AtFault from error

    async def _stage_each(self, tx: Any, given: Given, instance: Instance, lots: Sequence[Lot]) -> None:
        for move, events in lots:
            try:
                await self._stage(tx, instance, events)
            except Transient:
                raise
            except RAISED as error:
                given.blame(move, self.acting.unfit_to_stage(move, error))
                raise _AtFault from error

    async def _stage(self, tx: Any, instance: Instance, events: Sequence[Event]) -> None:
        with self.store.telling(tx):
            await self.stage(tx, *(acting.traced(event, instance) for event in events))

    def _quiet(self, record: Record, plan: Plan, debts: Sequence[Result]) -> bool:
        """Tell whether nothing has happened, so that there is nothing to save."""
        changes = plan.entries or plan.notes or plan.taken or plan.moves or plan.release or debts
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
