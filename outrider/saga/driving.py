"""One saga while a worker has it: turns, and the calls between them.

A call begins only after the turn that intends it is saved, and only while the claim certainly lasts. What it comes to
is told in the next turn. Whoever loses the claim throws everything away: the next owner calls again, with the same key.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from outrider.clock import Clock
from outrider.errors import ConcurrencyError, Transient
from outrider.observer import Observer, SagaStepUndone
from outrider.saga.acting import CANCELLED, Acted, Acting
from outrider.saga.clerk import Stage
from outrider.saga.definition import Saga
from outrider.saga.given import Given
from outrider.saga.news import Call, Claimed, Local, News, Raised, wanted
from outrider.saga.settings import LEASE_MARGIN, SagaSettings
from outrider.saga.strays import Strays
from outrider.saga.telling import facts_of
from outrider.saga.trouble import PAUSES, Trouble
from outrider.saga.turning import CommittedUnheard, Turned, Turning
from outrider.saga.waiting import wait_for
from outrider.saga_store import Claim, Record, SagaStore

CANCEL_SECONDS = 5.0
"""How long a call that is cancelled may take to notice."""

ABANDON_PAUSE_SECONDS = 0.1
WAIT_SECONDS_MIN = 0.005

UNDONE_MAX = 20
"""How often in a row the store may fail under a local step, in ways that may pass, before that costs an attempt.

Many sagas that write one document of MongoDB lose against each other all the time, through no fault of their own.
"""


@dataclass(frozen=True, slots=True)
class Means:
    """What all sagas of a worker share."""

    store: SagaStore
    stage: Stage
    settings: SagaSettings
    observer: Observer
    clock: Clock
    chance: random.Random
    trouble: Trouble
    strays: Strays
    ahead: Callable[[float], AbstractAsyncContextManager[None]]
    """Makes sure, around a local step, that no call loses its claim while that keeps everything waiting for so long."""


class Drive:
    """Drives one saga, from its claim to its release."""

    def __init__(self, means: Means, saga: Saga[Any], record: Record, *, stop: str | None = None) -> None:
        """Take over a saga that was claimed; `stop` is why it can only be stopped."""
        instance = record.instance
        assert instance.owner is not None
        self.claim = Claim(instance.owner, instance.saga_id, instance.epoch)
        self.in_turn = False
        self.wake_seconds: float | None = None
        self.released = False
        self.claimed_until = float("-inf")
        self._means, self._instance, self._hopeless = means, instance, stop
        self._acting = Acting(means.store, saga, means.strays, means.observer)
        self._turning = Turning(
            means.store,
            means.stage,
            self._acting,
            self.claim,
            instance.version,
            means.settings.lease_seconds,
            means.chance,
            means.clock,
        )
        self._record: Record | None = record
        self._news: list[News] = [Claimed()]
        self._todo: list[Call | Local] = []
        self._calls: dict[Call, asyncio.Task[Acted]] = {}
        self._due_at: float | None = None
        self._trusted_until = float("-inf")
        self._stopping, self._abandoning = asyncio.Event(), asyncio.Event()

    @property
    def calling(self) -> bool:
        """Tell whether a call is under way, which would be made again if the claim were lost."""
        return bool(self._calls)

    def adopt(self, record: Record) -> bool:
        """Go on under a claim that this worker has made anew, unless somebody has written the saga in between.

        Nobody begins anything before a turn is saved, so who has written nothing has begun nothing.
        """
        instance = record.instance
        if self.released or instance.version != self._turning.version:
            return False
        self.claim = self._turning.claim = self.claim._replace(epoch=instance.epoch)
        return True

    def stop(self) -> None:
        """Begin nothing more; give the saga back when what is under way has ended."""
        self._stopping.set()

    def abandon(self) -> None:
        """Give it back now; what is under way will be called again by the next owner."""
        self._stopping.set()
        self._abandoning.set()

    async def run(self) -> None:
        """Drive the saga until it is given back. Raises when the claim is lost."""
        try:
            while not await self._turn():
                self._begin_calls()
                await self._until_something_happens()
        finally:
            await self._cancel(list(self._calls))

    async def _turn(self) -> bool:
        """Take a turn; tell whether the saga is given back."""
        if self._abandoning.is_set():
            await self._cancel(list(self._calls))
        ended = [call for call, task in self._calls.items() if task.done()]
        leaving = self._stopping.is_set() and len(ended) == len(self._calls)
        given = Given(
            self._news,
            [_result(call, self._calls[call]) for call in ended],
            None if leaving else next((move for move in self._todo if isinstance(move, Local)), None),
            self._todo if leaving else None,
            self._hopeless,
        )
        local = given.local
        try:
            async with self._keeping_busy(local):
                turned = await self._taken(given)
        except CommittedUnheard:
            await self._begin_again()
            return False
        for call in ended:
            del self._calls[call]
        self._todo = [move for move in self._todo if move != local]
        await self._take_over(turned)
        return turned.turn is not None and turned.turn.release

    def _keeping_busy(self, local: Local | None) -> AbstractAsyncContextManager[None]:
        if local is None:
            return nullcontext()
        return self._means.ahead(self._acting.act(local.step, local.phase).timeout_seconds or 0.0)

    async def _taken(self, given: Given) -> Turned:
        """Take a turn, as soon as the store lets us."""
        means, undone = self._means, 0
        while True:
            self.in_turn = True
            try:
                turned = await self._turning.take(given, self._record)
            except ConcurrencyError:
                raise
            except Transient as error:
                self.in_turn = False
                undone += self._turning.entered
                if self._turning.entered and given.local:
                    await self._pause(self._undone(given, given.local, undone, error))
                else:
                    await self._pause(means.trouble.met(str(error)))
            else:
                means.trouble.over()
                if turned.turn:
                    self.released = turned.turn.release
                    self._trusted_until = self._turning.saved_at + means.settings.lease_seconds * LEASE_MARGIN
                    self.claimed_until = self._trusted_until
                return turned
            finally:
                self.in_turn = False
                self._record = None

    def _undone(self, given: Given, local: Local, times: int, error: Transient) -> float:
        """Tell that the store has failed under a local step, and charge it if that goes on; return how long to pause.

        The store has begun the transaction and read the saga, so it is not away; what fails may be the step's doing.
        """
        saga = self._instance.saga_id, self._instance.saga_type
        self._means.observer.notice(SagaStepUndone(*saga, local.step, local.phase, times, str(error)))
        if times >= UNDONE_MAX:
            text = f"the store has failed under it {times} times in a row, the last time so: {error}"
            given.blame(local, Raised(local.step, local.phase, text))
        return PAUSES.delay_seconds(times, self._means.chance)

    async def _begin_again(self) -> None:
        """Act as if the saga had just been claimed: a turn was saved, and what it planned is not known.

        What this worker has not begun costs no attempt: nobody else can have.
        """
        begun = frozenset((call.step, call.phase, call.attempt) for call in self._calls)
        await self._cancel(list(self._calls))
        self._turning.version = None
        self._news, self._todo = [Claimed(begun)], []

    async def _take_over(self, turned: Turned) -> None:
        """Let go of what the turn has made void, and remember what it wants to be done."""
        plan = turned.plan
        self._news = list(turned.owed)
        self.wake_seconds = plan.wake_seconds
        self._due_at = None if plan.wake_seconds is None else _now() + plan.wake_seconds
        if turned.turn is None:
            return
        self._instance = turned.turn.instance
        for fact in facts_of(turned.record, plan):
            self._means.observer.notice(fact)
        lines = {(entry.step, entry.phase): entry for entry in (*turned.record.journal, *plan.entries)}
        self._todo += [move for move in plan.moves if isinstance(move, Call | Local)]
        self._todo = [move for move in self._todo if wanted(lines.values(), move)]
        await self._cancel([call for call in self._calls if not wanted(lines.values(), call)])

    def _begin_calls(self) -> None:
        if self._stopping.is_set():
            return
        for call in [move for move in self._todo if isinstance(move, Call)]:
            if self._means.clock.boot_seconds() >= self._trusted_until:
                # The claim may have ended. If not, it is given back with what is not begun, at no cost.
                self.stop()
                return
            self._todo.remove(call)
            self._calls[call] = asyncio.create_task(self._acting.call(self._instance, call))

    async def _until_something_happens(self) -> None:
        """Wait for a call to end, for time to pass, or for an order to stop; now and then, look for mail."""
        stopping = self._stopping.is_set()
        if self._news or (stopping and not self._calls) or (not stopping and self._todo):
            return
        seconds = self._means.settings.poll_seconds_max
        if self._due_at is not None:
            seconds = min(seconds, max(WAIT_SECONDS_MIN, self._due_at - _now()))
        signal = asyncio.create_task((self._abandoning if stopping else self._stopping).wait())
        try:
            await asyncio.wait([signal, *self._calls.values()], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signal.cancel()

    async def _pause(self, seconds: float) -> None:
        """Leave the store alone for a while; less, if there is no time left."""
        if self._abandoning.is_set():
            await asyncio.sleep(min(seconds, ABANDON_PAUSE_SECONDS))
        else:
            await wait_for(self._abandoning, seconds)

    async def _cancel(self, calls: Collection[Call]) -> None:
        """End calls whose results nobody wants any more."""
        tasks = [self._calls.pop(call) for call in calls]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)


def _result(call: Call, task: asyncio.Task[Acted]) -> Acted:
    if task.cancelled():
        return Acted(call, Raised(call.step, call.phase, CANCELLED))
    return task.result()


def _now() -> float:
    return asyncio.get_running_loop().time()
