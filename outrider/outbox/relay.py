"""The relay: owns lanes, publishes their events, settles the outcomes.

Every duty is a separate method (`heartbeat`, `run_once`, `probe`, `run_maintenance`); `run` calls them in loops. One
worker at a time works on a lane: fetch, publish, settle, then the next fetch. A crash leaves rows unchanged, and the
next owner publishes the events again, in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from outrider.brokers.base import Broker
from outrider.clock import Clock, SystemClock
from outrider.errors import OutriderError
from outrider.outbox import lane_ownership
from outrider.outbox.batch import Batch
from outrider.outbox.circuit_breaker import CircuitBreakers
from outrider.outbox.increasing_fields import IncreasingFields
from outrider.outbox.lane_ownership import LaneOwnership
from outrider.outbox.model import Due, Fetched, Lease, Settlements
from outrider.outbox.publisher import BatchPublisher, FailurePolicy, describe, no_answer
from outrider.outbox.settings import RelaySettings
from outrider.outbox.store import OutboxStore
from outrider.outbox.unanswered import UnansweredEvents
from outrider.outbox.unsettled import UnsettledLanes
from outrider.payload.payloads import Payloads
from outrider.retry import RetryPolicy
from outrider.telemetry.events import (
    BreakerClosed,
    BreakerOpened,
    DeadLettersExpired,
    MaintenanceDone,
    Observer,
    Observers,
    PassCompleted,
    RelayStarted,
    RelayStopped,
    RelaySwept,
    StoreRecovered,
    StoreUnavailable,
)
from outrider.telemetry.health import StoreHealth

PRUNE_DUTY = "prune"

SOON_SECONDS = 0.2

DUE_EVENTS_MIN = 64

FETCHED_EVENTS_MIN = 512
"""The fewest events that a worker reads after a pass that ran out of time, so that no hot key hides other keys."""

PROBES_MAX = 8
"""The number of destinations that are probed at the same time."""


async def probe(
    broker: Broker, breakers: CircuitBreakers, clock: Clock, observer: Observer, policy: FailurePolicy
) -> float | None:
    """Probe the destinations that are due; return the seconds until the next probe, None if all are up.

    A probe fails without an answer within the time of a publish.
    """
    server, seconds = broker.capabilities.name, policy.settings.publish_timeout_seconds

    async def probe_one(name: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                await broker.probe(name)
        except Exception as error:
            # An adapter may raise anything; the destination is not known to work, and the breaker reports the error.
            late = isinstance(error, TimeoutError)
            text = policy.redactor().text(no_answer(server, seconds) if late else describe(error))
            wait = breakers.probe_failed(name, text, clock.boot_seconds())
            observer.emit(BreakerOpened(name, text, wait, server))
        else:
            breakers.probe_passed(name, clock.boot_seconds())
            observer.emit(BreakerClosed(name, server))

    began = clock.boot_seconds()
    due = [name for name, breaker in breakers.open_breakers() if (breaker.retry_at or 0.0) <= began]
    for start in range(0, len(due), PROBES_MAX):
        # Together, because a destination without an answer must delay no other probe.
        await asyncio.gather(*map(probe_one, due[start : start + PROBES_MAX]))
    now = clock.boot_seconds()
    return min((max(0.0, (breaker.retry_at or now) - now) for _, breaker in breakers.open_breakers()), default=None)


class Relay:
    """A relay, with a new name per start. `payloads` checks every event before it is published.

    >>> from outrider.stores.memory import MemoryStore
    >>> from outrider.testing import MemoryBroker
    >>> relay = Relay(MemoryStore(), MemoryBroker())
    """

    def __init__(
        self,
        store: OutboxStore,
        broker: Broker,
        settings: RelaySettings | None = None,
        *,
        observer: Observer | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        payloads: Payloads | None = None,
    ) -> None:
        self.store = store
        self.settings = settings or RelaySettings()
        self.observer = observer or Observers()
        self.clock = clock or SystemClock()
        self.rng = rng or random.Random()
        self.broker = broker
        self.breakers = CircuitBreakers(self.settings.breaker_seconds_base, self.settings.breaker_seconds_max)
        self._policy = FailurePolicy(self.settings, self.rng)
        self._unanswered = UnansweredEvents(self.clock, self._wake_worker_of)
        self.publisher = BatchPublisher(
            broker,
            self.breakers,
            self._policy,
            self.clock,
            self.observer,
            store.lanes,
            self._unanswered,
            payloads,
            IncreasingFields(payloads, store) if payloads is not None and payloads.increasing else None,
        )
        self.ownership = LaneOwnership(store, self.settings, self.clock, self.observer, self.rng, self._forget_lanes)
        self._wake_heartbeat = asyncio.Event()
        self._unsettled = UnsettledLanes(
            store, self.ownership, self.clock, self.observer, self.rng, self._wake_heartbeat.set
        )
        self._quotas = lane_ownership.ReadQuotas(store.lanes, self.settings.batch_max)
        self._next_due_seconds: dict[int, float | None] = {}
        # The events that a pass of a worker confirms in time, since a pass ran out of time.
        self._pass_events: dict[int, int] = {}
        self._health = StoreHealth(
            self.observer,
            lambda error: StoreUnavailable(self.name, error),
            lambda: StoreRecovered(self.name),
            RetryPolicy(base_seconds=SOON_SECONDS, cap_seconds=SOON_SECONDS, jitter=0),
        )
        self._stopping = asyncio.Event()
        self._wakes = [asyncio.Event() for _ in range(self.settings.workers)]

    @property
    def name(self) -> str:
        """Return the name under which the relay owns lanes."""
        return self.lease.owner

    @property
    def lease(self) -> Lease:
        """Return the lanes of the relay, with their epochs."""
        return self.ownership.lease

    async def heartbeat(self) -> None:
        """Renew the heartbeat, then move towards a fair share of the lanes."""
        if await self.ownership.heartbeat():
            self.wake()

    async def run_once(self, worker: int = 0) -> int:
        """Make one pass over a worker's lanes; return the number of settled events."""
        # A time from an earlier pass would make the worker spin if this pass ends early.
        self._next_due_seconds[worker] = None
        owned = await self.ownership.lease_for(worker, self._unanswered.lanes())
        lease = await self._unsettled.repeat(owned)
        self._next_due_seconds[worker] = self._unsettled.next_seconds(owned)
        if not lease.epochs or self.breakers.is_open(""):
            return 0
        started = self.clock.boot_seconds()
        fetched = await self._fetch(worker, lease)
        batch = await self._plan(worker, lease, fetched)
        publishing = self.clock.boot_seconds()
        is_late = await self.publisher.publish(batch, lease, self._may_publish(lease))
        self._learn_pass_events(worker, batch.confirmed, is_late=is_late)
        if is_late and not self.broker.capabilities.ordered:
            batch.defer_hot(self._quotas.full)
        published = self.clock.boot_seconds()
        settlements = self._with_values(batch.settlements)
        settled = await self._unsettled.settle(lease, settlements) if settlements else 0
        self._wait_at_most(worker, self._unsettled.next_seconds(owned))
        self._wait_at_most(worker, self._unanswered.next_seconds(lease))
        if settlements.confirmed or settlements.others:
            spent = published - publishing, self.clock.boot_seconds() - started
            self.observer.emit(PassCompleted(len(fetched.events), batch.confirmed, settled, *spent))
        return settled

    async def probe(self) -> float | None:
        """Probe destinations that are down; return the seconds until the next probe, None if all are up."""
        down = bool(self.breakers.open_breakers())
        wait = await probe(self.broker, self.breakers, self.clock, self.observer, self._policy)
        if down and not self.breakers.is_open(""):
            self.wake()
        return wait

    async def run_maintenance(self) -> None:
        """Remove dead relays; if the duty falls to this relay, also prepare partitions and apply retention."""
        for dead in await self.store.maintenance.sweep():
            self.observer.emit(RelaySwept(dead.relay, dead.lanes))
        if await self.store.maintenance.take_duty(PRUNE_DUTY, self.settings.maintenance_interval_seconds):
            await self.store.maintenance.prepare()
            retention = self.settings.retention
            pruned = await self.store.maintenance.prune(retention)
            if pruned.dead_letters and retention.dead_letter_days is not None:
                self.observer.emit(DeadLettersExpired(pruned.dead_letters, retention.dead_letter_days))
            if any(pruned):
                self.observer.emit(MaintenanceDone(*pruned))

    async def run(self) -> None:
        """Relay until `stop` is called; then settle the events in flight, and leave."""
        try:
            await self._run()
        finally:
            self.publisher.close()

    async def _run(self) -> None:
        await self.broker.start()
        await self.heartbeat()
        self.observer.emit(RelayStarted(self.name, len(self.lease.epochs)))
        async with self.store.listen(self.wake), asyncio.TaskGroup() as tasks:
            duties = [
                tasks.create_task(self._loop(self.heartbeat, self.settings.heartbeat_seconds, self._wake_heartbeat)),
                tasks.create_task(
                    self._loop(self.run_maintenance, self.settings.maintenance_interval_seconds, asyncio.Event())
                ),
                tasks.create_task(self._run_probes()),
            ]
            await asyncio.gather(*(tasks.create_task(self._run_worker(n)) for n in range(self.settings.workers)))
            for duty in duties:
                duty.cancel()
        await self._leave()
        self.observer.emit(RelayStopped(self.name))

    async def _leave(self) -> None:
        try:
            await self.store.leave(self.name)
        except OutriderError as error:
            # No event is in flight; the lanes are free when the lease ends.
            self._health.failed(str(error))

    def stop(self) -> None:
        """Request a clean stop: no new wave begins, and confirmed events are settled, to avoid a second publish."""
        self._stopping.set()
        self.wake()

    def wake(self) -> None:
        """Look for work now. Safe to call from the event loop at any time."""
        for event in self._wakes:
            event.set()

    async def _run_worker(self, worker: int) -> None:
        idle_seconds = self.settings.poll_seconds_min
        while not self._stopping.is_set():
            self._wakes[worker].clear()
            try:
                settled = await self.run_once(worker)
            except OutriderError as error:
                # Also errors that are not transient: the relay reports the error and continues, because other lanes may
                # work.
                self._health.failed(str(error))
                settled = 0
            if settled:
                idle_seconds = self.settings.poll_seconds_min
                continue
            due = self._next_due_seconds.get(worker)
            await _wait(self._wakes[worker], idle_seconds if due is None else min(idle_seconds, due))
            woken = self._wakes[worker].is_set()
            idle_seconds = (
                self.settings.poll_seconds_min if woken else min(idle_seconds * 2, self.settings.poll_seconds_max)
            )
        await self._finish(worker)
        # The last chance for outcomes that could not be written before: the next owner would publish the events again.
        await self._unsettled.repeat(self.ownership.lanes_of(worker), at_once=True)

    async def _finish(self, worker: int) -> None:
        """Wait for the outstanding answers of a worker and settle their events, without a new publish."""
        await self._unanswered.wait(self.ownership.lanes_of(worker))
        lease = self.ownership.lanes_of(worker)
        batch = Batch()
        self.publisher.finish(batch, lease)
        if settlements := self._with_values(batch.settlements):
            await self._unsettled.settle(lease, settlements)

    def _with_values(self, settlements: Settlements) -> Settlements:
        """Add the values of increasing fields, which are written with the outcomes."""
        increases = self.publisher.increases
        return settlements if increases is None else replace(settlements, last_values=increases.values_of(settlements))

    async def _loop(self, step: Callable[[], Awaitable[None]], seconds: float, sooner: asyncio.Event) -> None:
        """Repeat a step. After a failure of the store the next try comes soon, because the lease is running out."""
        pause = seconds
        while True:
            await _wait(sooner, pause)
            sooner.clear()
            try:
                await step()
            except OutriderError as error:
                pause = min(seconds, self._health.failed(str(error)))
            else:
                self._health.recovered()
                pause = seconds

    async def _run_probes(self) -> None:
        while True:
            wait = await self.probe()
            await asyncio.sleep(self.settings.breaker_seconds_base / 2 if wait is None else wait)

    async def _fetch(self, worker: int, lease: Lease) -> Fetched:
        events_max = self._events_max(worker, 5 / 4, FETCHED_EVENTS_MIN)
        quotas = self._quotas.quotas(lease.epochs, worker, events_max)
        is_size_known = self._quotas.is_size_known
        fetched = await self._read(lease, quotas)
        if fetched.events and not is_size_known:
            return await self._fetch(worker, lease)
        if not fetched.events and not all(quotas.values()):
            # The lanes that were left out may have events, and the worker must not wait.
            return await self._read(lease, dict.fromkeys(quotas, 1))
        return fetched

    async def _read(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        fetched = await self.store.fetch(lease, quotas)
        self.ownership.check(lease, fetched.lanes)
        self._quotas.learn(fetched, quotas)
        return fetched

    def _may_publish(self, lease: Lease) -> Callable[[], bool]:
        """Return the test for the start of a wave: the publish timeout must end inside the lease, and no stop is
        requested.

        A stop does not wait for the rest of a batch, because a long stream can have thousands of waves.
        """
        seconds = self.settings.publish_timeout_seconds
        return lambda: self.ownership.covers(lease, seconds) and not self._stopping.is_set()

    async def _plan(self, worker: int, lease: Lease, fetched: Fetched) -> Batch:
        """Plan the batch; blocked streams are read only in lanes with blocked streams."""
        blocked, due = set(), Due([], None)
        if fetched.blocked_lanes:
            rows = [event for event in fetched.events if event.lane in fetched.blocked_lanes]
            streams = list(dict.fromkeys(event.stream for event in rows))
            blocked = await self.store.blocked(streams) if streams else set()
            due = await self.store.due(lease.only(fetched.blocked_lanes), self._events_max(worker, 2, DUE_EVENTS_MIN))
        self._wait_at_most(worker, due.next_seconds)
        batch = Batch.plan(fetched.events, due.streams, blocked, self._unanswered.streams(lease))
        self.publisher.finish(batch, lease)
        return batch

    def _events_max(self, worker: int, share: float, events_min: int) -> int:
        """Return the number of events to read: not many more than a pass that ran out of time could publish.

        What a pass leaves is read again.
        """
        confirmed, events_max = self._pass_events.get(worker), self._quotas.batch_max
        return events_max if confirmed is None else min(events_max, max(events_min, int(share * confirmed)))

    def _learn_pass_events(self, worker: int, confirmed: int, *, is_late: bool) -> None:
        if is_late:
            self._pass_events[worker] = confirmed
        elif (known := self._pass_events.get(worker)) is not None:
            self._pass_events[worker] = 2 * max(known, DUE_EVENTS_MIN)
            if self._pass_events[worker] >= self._quotas.batch_max:
                del self._pass_events[worker]

    def _wait_at_most(self, worker: int, seconds: float | None) -> None:
        known = (self._next_due_seconds.get(worker), seconds)
        self._next_due_seconds[worker] = min((each for each in known if each is not None), default=None)

    def _forget_lanes(self, lanes: set[int]) -> None:
        self.publisher.drop(lanes)
        self.breakers.clear_lanes(lanes)
        self._unsettled.drop(lanes)

    def _wake_worker_of(self, lane: int) -> None:
        self._wakes[lane % self.settings.workers].set()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set or the seconds have passed."""
    try:
        async with asyncio.timeout(max(seconds, 0.001)):
            await event.wait()
    except TimeoutError:
        return
