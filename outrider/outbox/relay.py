"""The relay: owns lanes, publishes what is in them, settles the outcome.

Each duty is a step that can be called by itself (`keep`, `work`, `probe`, `tend`); `run` calls them in loops. A lane is
worked on by one worker at a time: fetch, publish, settle, and only then the next fetch. What a crash leaves behind is
rows as they were; the next owner publishes them again, in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from outrider.broker import Broker
from outrider.clock import Clock, SystemClock
from outrider.errors import OutriderError
from outrider.event import default_topic
from outrider.observer import (
    Observer,
    Observers,
    Passed,
    RelayStarted,
    RelayStopped,
    RelaySwept,
    StoreRecovered,
    StoreTroubled,
    UpkeepDone,
)
from outrider.outbox import lanes, probing
from outrider.outbox.breaker import Breakers
from outrider.outbox.course import Course
from outrider.outbox.plan import plan
from outrider.outbox.publisher import Publisher
from outrider.outbox.settings import RelaySettings
from outrider.outbox.streams import TopicRule, stream_of
from outrider.outbox.tenure import Tenure
from outrider.outbox.verdicts import Judge
from outrider.store import Due, Fetched, Lease, Store

PRUNE_DUTY = "prune"
SOON_SECONDS = 0.2


class Relay:
    """One relay, with a fresh name per start.

    >>> from outrider.stores.memory import MemoryStore
    >>> from outrider.testing import MemoryBroker
    >>> relay = Relay(MemoryStore(), MemoryBroker())
    """

    def __init__(
        self,
        store: Store,
        broker: Broker,
        settings: RelaySettings | None = None,
        *,
        observer: Observer | None = None,
        clock: Clock | None = None,
        rule: TopicRule = default_topic,
        chance: random.Random | None = None,
    ) -> None:
        self.store = store
        self.settings = settings or RelaySettings()
        self.observer = observer or Observers()
        self.clock = clock or SystemClock()
        self.rule = rule
        self.chance = chance or random.Random()
        self.broker = broker
        self.breakers = Breakers(self.settings.breaker_seconds_base, self.settings.breaker_seconds_max)
        judge = Judge(self.settings, self.chance)
        self.publisher = Publisher(broker, self.breakers, judge, self.clock, self.observer, store.lanes, rule)
        self.tenure = Tenure(store, self.settings, self.clock, self.observer, self.chance, self.breakers.forget_lanes)
        self._budget = lanes.Budget(store.lanes, self.settings.batch_max)
        self._next_due_seconds: dict[int, float | None] = {}
        self._troubled = False
        self._stopping = asyncio.Event()
        self._wake_keeper = asyncio.Event()
        self._wakes = [asyncio.Event() for _ in range(self.settings.workers)]

    @property
    def name(self) -> str:
        """Return who owns this relay's lanes."""
        return self.lease.owner

    @property
    def lease(self) -> Lease:
        """Return the lanes that this relay owns, with their epochs."""
        return self.tenure.lease

    async def keep(self) -> None:
        """Renew the heartbeat, then move towards a fair share of the lanes."""
        if await self.tenure.keep():
            self.wake()

    async def work(self, worker: int = 0) -> int:
        """Make one pass over a worker's lanes; return how many events it moved."""
        # What was due in an earlier pass says nothing if this one ends early; a worker would spin on it.
        self._next_due_seconds[worker] = None
        lease = await self.tenure.own_lanes(worker)
        if not lease.epochs or self.breakers.open(""):
            return 0
        begun = self.clock.boot_seconds()
        quotas = self._budget.quotas(lease.epochs)
        fetched = await self.store.fetch(lease, quotas)
        self.tenure.check(lease, fetched.lanes)
        self._budget.notice(fetched, quotas)
        course = await self._plan(worker, lease, fetched)
        publishing = self.clock.boot_seconds()
        await self.publisher.run(course, self._may_publish(lease))
        published = self.clock.boot_seconds()
        settled = await self._settle(lease, course)
        if course.sent or course.settlements:
            spent = published - publishing, self.clock.boot_seconds() - begun
            self.observer.notice(Passed(len(fetched.events), course.confirmed, settled, *spent))
        return settled

    async def probe(self) -> float | None:
        """Try destinations that were down; return the seconds until the next try, None if nothing is down."""
        down = bool(self.breakers.waiting())
        seconds = self.settings.publish_timeout_seconds
        wait = await probing.probe(self.broker, self.breakers, self.clock, self.observer, seconds)
        if down and not self.breakers.open(""):
            self.wake()
        return wait

    async def tend(self) -> None:
        """Do upkeep, if it is this relay's turn: watchdog, room ahead, retention."""
        for swept in await self.store.upkeep.sweep():
            self.observer.notice(RelaySwept(swept.relay, swept.lanes))
        if await self.store.upkeep.take_duty(PRUNE_DUTY, self.settings.upkeep_seconds):
            await self.store.upkeep.prepare()
            pruned = await self.store.upkeep.prune(self.settings.retention)
            if any(pruned):
                self.observer.notice(UpkeepDone(*pruned))

    async def run(self) -> None:
        """Relay until `stop` is called; then finish what is in flight, and leave."""
        await self.broker.start()
        await self.keep()
        self.observer.notice(RelayStarted(self.name, len(self.lease.epochs)))
        async with self.store.wakeups(self.wake), asyncio.TaskGroup() as tasks:
            duties = [
                tasks.create_task(self._loop(self.keep, self.settings.beat_seconds, self._wake_keeper)),
                tasks.create_task(self._loop(self.tend, self.settings.upkeep_seconds, asyncio.Event())),
                tasks.create_task(self._probing()),
            ]
            await asyncio.gather(*(tasks.create_task(self._working(n)) for n in range(self.settings.workers)))
            for duty in duties:
                duty.cancel()
        await self._leave()
        self.observer.notice(RelayStopped(self.name))

    async def _leave(self) -> None:
        try:
            await self.store.leave(self.name)
        except OutriderError as error:
            # Everything in flight is settled or owed; the lanes are free when the lease ends.
            self._trouble(error)

    def stop(self) -> None:
        """Ask for a clean stop: no wave is begun any more, and what is confirmed is settled; nothing goes out twice."""
        self._stopping.set()
        self.wake()

    def wake(self) -> None:
        """Look for work now. Safe to call from the event loop at any time."""
        for event in self._wakes:
            event.set()

    async def _working(self, worker: int) -> None:
        idle_seconds = self.settings.poll_seconds_min
        while not self._stopping.is_set():
            self._wakes[worker].clear()
            try:
                moved = await self.work(worker)
            except OutriderError as error:
                # Not only what is known to pass: a relay that ends over one bad answer helps nobody. It is told.
                self._trouble(error)
                moved = 0
            if moved:
                idle_seconds = self.settings.poll_seconds_min
                continue
            due = self._next_due_seconds.get(worker)
            await _wait(self._wakes[worker], idle_seconds if due is None else min(idle_seconds, due))
            woken = self._wakes[worker].is_set()
            idle_seconds = (
                self.settings.poll_seconds_min if woken else min(idle_seconds * 2, self.settings.poll_seconds_max)
            )

    async def _loop(self, step: Callable[[], Awaitable[None]], seconds: float, sooner: asyncio.Event) -> None:
        """Repeat a step. After trouble with the store it is tried again soon; the lease decides what that costs."""
        pause = seconds
        while True:
            await _wait(sooner, pause)
            sooner.clear()
            try:
                await step()
            except OutriderError as error:
                self._trouble(error)
                pause = min(seconds, SOON_SECONDS)
            else:
                self._recover()
                pause = seconds

    def _trouble(self, error: OutriderError) -> None:
        if not self._troubled:
            self._troubled = True
            self.observer.notice(StoreTroubled(self.name, str(error)))

    def _recover(self) -> None:
        if self._troubled:
            self._troubled = False
            self.observer.notice(StoreRecovered(self.name))

    async def _probing(self) -> None:
        while True:
            wait = await self.probe()
            await asyncio.sleep(self.settings.breaker_seconds_base / 2 if wait is None else wait)

    def _may_publish(self, lease: Lease) -> Callable[[], bool]:
        """A wave may begin only if even its time-out falls inside the lease.

        None begins after a stop was asked for: a long stream can be thousands of waves.
        """
        seconds = self.settings.publish_timeout_seconds
        return lambda: self.tenure.covers(lease, seconds) and not self._stopping.is_set()

    async def _plan(self, worker: int, lease: Lease, fetched: Fetched) -> Course:
        """Look up what is blocked, in the lanes that have anything blocked, and plan the course."""
        blocked, due = set(), Due([], None)
        if fetched.blocked_lanes:
            rows = [event for event in fetched.events if event.lane in fetched.blocked_lanes]
            streams = list(dict.fromkeys(stream_of(event, self.rule) for event in rows))
            blocked = await self.store.blocked(streams) if streams else set()
            due = await self.store.due(lease.only(fetched.blocked_lanes), self._budget.batch_max)
        self._next_due_seconds[worker] = due.next_seconds
        return plan(fetched.events, due.streams, blocked, self.rule)

    async def _settle(self, lease: Lease, course: Course) -> int:
        if not course.sent and not course.settlements and not course.emptied:
            return 0
        try:
            if course.sent:
                return await self.store.confirm(lease, course.sent)
            return await self.store.settle(lease, course.settlements, course.emptied) + len(course.emptied)
        except OutriderError:
            await self.tenure.forsake(lease)
            self._wake_keeper.set()
            raise


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, or for time to pass."""
    try:
        async with asyncio.timeout(max(seconds, 0.001)):
            await event.wait()
    except TimeoutError:
        return
