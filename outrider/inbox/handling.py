"""Handling arrivals: transactions that succeed, fail or have to wait, and streams that drain.

A handler that raises is charged an attempt. A store that does not answer charges nothing: it is no event's fault.
Whoever loses a race tries again soon, and without a word.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from outrider.backoff import RetryPolicy
from outrider.delivery import Arrival, InboxStream
from outrider.errors import OutriderError, RaceLost, UnfitHandler
from outrider.inbox import turns
from outrider.inbox.calling import HandlerFailed
from outrider.inbox.failures import Failures
from outrider.inbox.router import Routes
from outrider.inbox.turns import Turns
from outrider.inbox_store import Applied, Buried, Dropped, InboxStore, Stalled, Waits
from outrider.observer import (
    ConsumerBroken,
    ConsumerBuried,
    ConsumerRecovered,
    ConsumerTroubled,
    Handled,
    NoHandler,
    Observer,
    WaitingFull,
)

TROUBLE = RetryPolicy(base_seconds=0.2, cap_seconds=10)
RACES = RetryPolicy(base_seconds=0.01, cap_seconds=0.2, jitter=0.5, max_attempts=20)
"""How often handlers that write the same document may lose against each other, before that is trouble."""
STALL_SECONDS = 1.0
STRANGE_MAX = 100


@dataclass(slots=True)
class Tried:
    """What became of arrivals: those committed, those left, and how long the lines of those left must rest."""

    done: list[Arrival] = field(default_factory=list)
    left: list[Arrival] = field(default_factory=list)
    rest_seconds: dict[InboxStream, float] = field(default_factory=dict)
    stalled: set[InboxStream] = field(default_factory=set)

    def add(self, other: Tried) -> None:
        """Take in what became of others."""
        self.done += other.done
        self.left += other.left
        self.rest_seconds |= other.rest_seconds
        self.stalled |= other.stalled


class Handling:
    """Handles the arrivals of one consumer."""

    def __init__(self, store: InboxStore, routes: Routes, observer: Observer, chance: random.Random) -> None:
        self._store, self._routes, self._observer, self._chance = store, routes, observer, chance
        self._failures = Failures(routes, observer, chance)
        self._drains: dict[InboxStream, asyncio.Task[None]] = {}
        self._troubles = 0
        self._ending = False
        self._strange: set[tuple[str, str]] = set()
        self._broken = asyncio.Event()
        self._error: BaseException | None = None

    async def handle(self, arrivals: Sequence[Arrival]) -> Tried:
        """Try all in one transaction; if a handler fails in it, one by one, so that each key has its own fate."""
        tried = await self._attempt(arrivals)
        if len(arrivals) == 1 or not tried.left:
            return tried
        result = Tried(done=tried.done, rest_seconds=tried.rest_seconds, stalled=tried.stalled)
        for arrival in tried.left:
            if arrival.stream in result.rest_seconds:
                result.left.append(arrival)
            else:
                result.add(await self._attempt([arrival]))
        return result

    def drain(self, stream: InboxStream) -> None:
        """Let a stream's waiting events go, in the background."""
        if stream not in self._drains:
            task = asyncio.create_task(self._drain(stream))
            self._drains[stream] = task
            task.add_done_callback(partial(self._drain_ended, stream))

    def _drain_ended(self, stream: InboxStream, task: asyncio.Task[None]) -> None:
        self._drains.pop(stream, None)
        if not task.cancelled() and (error := task.exception()):
            self._error = error
            self._broken.set()

    async def broken(self) -> None:
        """Wait for something in the background that the consumer must not outlive, and raise it."""
        await self._broken.wait()
        assert self._error is not None
        raise self._error

    @property
    def draining(self) -> bool:
        """Tell whether something drains."""
        return bool(self._drains)

    def forget(self, arrivals: Sequence[Arrival]) -> None:
        """Forget how often arrivals have failed that are given up: whoever gets them next begins anew, also if that is
        this process.
        """
        self._failures.forget(arrivals)

    async def drained(self) -> None:
        """Wait until nothing drains."""
        while self._drains:
            await asyncio.wait(self._drains.values())

    async def stop(self) -> None:
        """End what drains; whatever is not committed leaves no trace, and goes on elsewhere or later."""
        # A drain may miss that it is cancelled, when its connection is lost at that moment.
        self._ending = True
        tasks = list(self._drains.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def trouble(self, error: str) -> float:
        """Note that store or broker does not answer, once; return how long to leave it alone."""
        self._troubles += 1
        if self._troubles == 1:
            self._observer.notice(ConsumerTroubled(self._routes.consumer, error))
        return TROUBLE.delay_seconds(self._troubles, self._chance)

    def well(self) -> None:
        """Note that it answers again."""
        if self._troubles:
            self._troubles = 0
            self._observer.notice(ConsumerRecovered(self._routes.consumer))

    async def _attempt(self, arrivals: Sequence[Arrival]) -> Tried:
        begun = time.monotonic()
        try:
            done = await self._commit(turns.arrivals_of(self._store, self._routes, arrivals))
        except HandlerFailed as failed:
            if len(arrivals) > 1:
                return Tried(left=list(arrivals))
            return _resting(arrivals, await self._charge(failed))
        except UnfitHandler:
            raise
        except OutriderError as error:
            return _resting(arrivals, self.trouble(str(error)))
        self._committed(done, time.monotonic() - begun)
        stalled = [entry.arrival for entry in done.of(Stalled)]
        tried = _resting(stalled, STALL_SECONDS)
        tried.stalled = {arrival.stream for arrival in stalled}
        # By what was delivered: an arrival may have lost its number on the way.
        kept = [arrival.delivery for arrival in stalled]
        tried.done = [arrival for arrival in arrivals if arrival.delivery not in kept] if kept else list(arrivals)
        return tried

    async def _drain(self, stream: InboxStream) -> None:
        limit, failing = self._routes.settings.batch_max, None
        while not self._ending:
            begun = time.monotonic()
            try:
                done = await self._commit(turns.waiting_of(self._store, self._routes, stream, limit))
            except HandlerFailed as failed:
                alone, limit, failing = limit == 1, 1, failed.arrival
                await asyncio.sleep(await self._charge(failed) if alone else 0)
                continue
            except UnfitHandler:
                raise
            except OutriderError as error:
                await asyncio.sleep(self.trouble(str(error)))
                continue
            self._committed(done, time.monotonic() - begun)
            if stream not in done.draining:
                # Another process may have it now; when it comes back, its attempts are counted anew.
                self._failures.forget([failing] if failing else [])
                return

    async def _commit(self, take: turns.Take) -> Turns:
        races = 0
        while True:
            try:
                return await self._commit_once(take)
            except RaceLost:
                races += 1
                if races == RACES.max_attempts:
                    raise
                await asyncio.sleep(RACES.delay_seconds(races, self._chance))

    async def _commit_once(self, take: turns.Take) -> Turns:
        try:
            return await turns.commit(self._store, self._routes, take, self._failures.to_bury)
        except UnfitHandler as error:
            # To go on would do more harm: the receipt may say that something is done which is not.
            self._observer.notice(ConsumerBroken(self._routes.consumer, str(error)))
            raise

    async def _charge(self, failed: HandlerFailed) -> float:
        """Charge an attempt, unless the store has gone away under the handler."""
        if await self._store.answers():
            return self._failures.charge(failed)
        return self.trouble(str(failed))

    def _committed(self, done: Turns, seconds: float) -> None:
        self.well()
        self._failures.forget(entry.arrival for entry in done.entries)
        self._failures.forget(done.duplicates)
        self._tell(done, seconds)
        for stream in done.draining:
            self.drain(stream)

    def _tell(self, done: Turns, seconds: float) -> None:
        consumer = self._routes.consumer
        applied, dropped, waiting = (len(done.of(kind)) for kind in (Applied, Dropped, Waits))
        strange = [arrival for arrival, conclusion in done.entries if conclusion is turns.NO_HANDLER]
        dropped -= len(strange)
        counts = applied, len(done.duplicates), dropped, waiting, len(strange)
        self._observer.notice(Handled(consumer, *counts, seconds=seconds))
        self._tell_of_types(strange)
        for arrival, conclusion in done.of(Buried):
            assert isinstance(conclusion, Buried)
            self._observer.notice(
                ConsumerBuried(
                    consumer,
                    arrival.event_id,
                    arrival.delivery.topic,
                    arrival.event_type,
                    conclusion.reason,
                    conclusion.policy,
                    conclusion.failure.get("kind"),
                    conclusion.failure["error"],
                    conclusion.failure.get("where"),
                    done.dead_letters.get(arrival.event_id),
                )
            )
        for arrival, _ in done.of(Stalled):
            topic, key, _ = arrival.stream
            self._observer.notice(WaitingFull(consumer, topic, key, done.standings[arrival.stream].waiting))

    def _tell_of_types(self, arrivals: Sequence[Arrival]) -> None:
        """Tell of each type that has no handler once; anyone may write to a topic, so not of all there could be."""
        for arrival in arrivals:
            kind = (arrival.delivery.topic, arrival.event_type)
            if kind not in self._strange and len(self._strange) < STRANGE_MAX:
                self._strange.add(kind)
                self._observer.notice(NoHandler(self._routes.consumer, *kind))


def _resting(arrivals: Sequence[Arrival], seconds: float) -> Tried:
    return Tried(left=list(arrivals), rest_seconds={arrival.stream: seconds for arrival in arrivals})
