"""The relay: owns lanes, publishes what is in them, settles the outcome.

Each duty is a step that can be called by itself (`keep`, `work`, `probe`, `tend`); `run` calls them in loops. A lane is
worked on by one worker at a time: fetch, publish, settle, and only then the next fetch. What a crash leaves behind is
rows as they were; the next owner publishes them again, in order.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from operator import attrgetter

from outrider.broker import Broker
from outrider.clock import Clock, SystemClock
from outrider.errors import OutriderError
from outrider.event import default_topic
from outrider.observer import (
    LanesClaimed,
    LanesReleased,
    LeaseLost,
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
from outrider.outbox import lanes
from outrider.outbox.breaker import Breakers
from outrider.outbox.publisher import Publisher
from outrider.outbox.settings import LEASE_MARGIN, RelaySettings
from outrider.outbox.streams import Course, TopicRule, payload_bytes, plan, stream_of
from outrider.outbox.verdicts import Judge
from outrider.store import Due, Fetched, Lease, Store

PRUNE_DUTY = "prune"
SOON_SECONDS = 0.2
_LANE = attrgetter("lane")


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
        self.lease = Lease(self._fresh_name())
        self._joining = True
        self._trusted_until = float("-inf")
        self._surrender: set[int] = set()
        self._full: set[int] = set()
        self._bytes_mean = 0.0
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
    def _batch_max(self) -> int:
        return lanes.batch(self.settings.batch_max, self._bytes_mean)

    async def keep(self) -> None:
        """Renew the heartbeat, then move towards a fair share of the lanes."""
        sent = self.clock.boot_seconds()
        pulse = await self.store.beat(self.name, self.settings.lease_seconds, joining=self._joining)
        if pulse is None:
            self._lose_everything()
            return
        self._joining = False
        self._trusted_until = sent + self.settings.lease_seconds * LEASE_MARGIN
        change = lanes.rebalance(
            self.lease.epochs, pulse.free_lanes, lanes=self.store.lanes, relays=pulse.relays, chance=self.chance
        )
        self._surrender = set(change.surrender)
        if change.claim:
            await self._claim(change.claim)

    async def work(self, worker: int = 0) -> int:
        """Make one pass over a worker's lanes; return how many events it moved."""
        # What was due in an earlier pass says nothing if this one ends early; a worker would spin on it.
        self._next_due_seconds[worker] = None
        lease = await self._own_lanes(worker)
        if not lease.epochs or self.breakers.open(""):
            return 0
        begun = self.clock.boot_seconds()
        quotas = lanes.quotas(lease.epochs, self._full, lanes=self.store.lanes, batch_max=self._batch_max)
        fetched = await self.store.fetch(lease, quotas)
        self._notice_lanes(lease, fetched, quotas)
        self._notice_sizes(fetched)
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
        wait = await self.publisher.probe()
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

    async def _own_lanes(self, worker: int) -> Lease:
        """Return the worker's lanes, after handing over those that others should have: it has nothing in flight now."""
        mine = self.lease.only(lane for lane in self.lease.epochs if lane % self.settings.workers == worker)
        surplus = self._surrender & mine.epochs.keys()
        if surplus:
            await self.store.release(mine.only(surplus))
            self._drop(mine.only(surplus))
            self.observer.notice(LanesReleased(self.name, tuple(sorted(surplus))))
        return mine.without(surplus)

    def _may_publish(self, lease: Lease) -> Callable[[], bool]:
        """A wave may begin only if even its time-out falls inside the lease, and the lease is still the one we hold.

        None begins after a stop was asked for: a long stream can be thousands of waves.
        """

        def may_publish() -> bool:
            latest = self.clock.boot_seconds() + self.settings.publish_timeout_seconds
            return lease.owner == self.name and latest < self._trusted_until and not self._stopping.is_set()

        return may_publish

    async def _claim(self, wanted: tuple[int, ...]) -> None:
        try:
            won = await self.store.claim(self.name, wanted)
        except OutriderError:
            # The lanes may be ours without our knowing, and nobody would work on them while this name lives.
            self._lose_everything()
            raise
        if won.epochs:
            self.lease = Lease(self.name, {**self.lease.epochs, **won.epochs})
            self.observer.notice(LanesClaimed(self.name, tuple(won.epochs)))
            self.wake()

    def _drop(self, lost: Lease) -> None:
        """Give up lanes, unless they have come back at a later epoch while the loss was on its way to us."""
        gone = {lane for lane, epoch in lost.epochs.items() if self.lease.epochs.get(lane) == epoch}
        gone = gone if lost.owner == self.name else set()
        self.lease = self.lease.without(gone)
        self._surrender -= gone
        self._full -= gone
        self.breakers.forget_lanes(gone)

    def _lose_everything(self) -> None:
        lost = tuple(self.lease.epochs)
        self.observer.notice(LeaseLost(self.name, lost))
        self._drop(self.lease)
        self._trusted_until = float("-inf")
        self.lease = Lease(self._fresh_name())
        self._joining = True

    def _notice_lanes(self, lease: Lease, fetched: Fetched, quotas: dict[int, int]) -> None:
        lost = lease.epochs.keys() - fetched.lanes
        if lost and lease.owner == self.name:
            self._drop(lease.only(lost))
            self.observer.notice(LeaseLost(self.name, tuple(sorted(lost))))
        counts = Counter(map(_LANE, fetched.events))
        self._full -= fetched.lanes
        self._full |= {lane for lane, count in counts.items() if count >= quotas[lane]}

    def _notice_sizes(self, fetched: Fetched) -> None:
        """Remember how large events are. Slow to forget, because lanes differ, and too small a batch harms nobody."""
        if fetched.events:
            mean = payload_bytes(fetched.events) / len(fetched.events)
            self._bytes_mean = max(mean, self._bytes_mean / 2)

    async def _plan(self, worker: int, lease: Lease, fetched: Fetched) -> Course:
        """Look up what is blocked, in the lanes that have anything blocked, and plan the course."""
        blocked, due = set(), Due([], None)
        if fetched.blocked_lanes:
            rows = [event for event in fetched.events if event.lane in fetched.blocked_lanes]
            streams = list(dict.fromkeys(stream_of(event, self.rule) for event in rows))
            blocked = await self.store.blocked(streams) if streams else set()
            due = await self.store.due(lease.only(fetched.blocked_lanes), self._batch_max)
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
            await self._forsake(lease)
            raise

    async def _forsake(self, lease: Lease) -> None:
        """Give up lanes after a settle of which nobody knows whether, or when, it is written.

        It may still arrive, and it would find this relay the owner. At a new epoch the fence keeps it out.
        """
        try:
            await self.store.release(lease)
        except OutriderError:
            self._lose_everything()
        else:
            self._drop(lease)
        self._wake_keeper.set()

    def _fresh_name(self) -> str:
        return f"relay-{self.chance.getrandbits(48):012x}"


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, or for time to pass."""
    try:
        async with asyncio.timeout(max(seconds, 0.001)):
            await event.wait()
    except TimeoutError:
        return
