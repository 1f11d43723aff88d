"""The consumer: receives events, runs handlers of different keys concurrently, and acks committed events.

A handler that raises counts an attempt of its event. The event is tried again in place while its key waits; after the
last attempt the event is dead-lettered. An unavailable store or broker counts no attempt; the consumer waits.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from outrider.brokers.base import Source
from outrider.errors import OutriderError, Transient
from outrider.event import InboxStream, ReceivedEvent
from outrider.inbox.executor import AttemptResult, HandlerExecutor
from outrider.inbox.key_queues import KeyQueues
from outrider.inbox.router import Routes
from outrider.inbox.settings import Ordering
from outrider.inbox.store import InboxStore
from outrider.telemetry.events import (
    ConsumerStarted,
    ConsumerStopped,
    GapOverdue,
    HandlerTimedOut,
    InboxMaintenanceDone,
    Observer,
    Observers,
    PartitionsRevoked,
)
from outrider.wire import decode

PRUNE_SECONDS = 600.0

STREAMS_MAX = 100


class Consumer:
    """Runs the handlers of one consumer over one source. Rejects handlers that cannot work with the store."""

    def __init__(
        self,
        source: Source,
        store: InboxStore,
        routes: Routes,
        *,
        observer: Observer | None = None,
        rng: random.Random | None = None,
    ) -> None:
        routes.check(store)
        self._source, self._settings = source, routes.settings
        self._routes = routes
        self._observer = observer or Observers()
        self._executor = HandlerExecutor(store, routes, self._observer, rng or random.Random())
        self._maintenance = ConsumerMaintenance(store, routes, self._executor, self._observer)
        self._queues = KeyQueues()
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stalled: set[InboxStream] = set()
        self._in_flight: dict[asyncio.Task[None], list[ReceivedEvent]] = {}

    def stop(self) -> None:
        """Ask for a clean stop: handlers in progress finish and are acked, remaining events stay with the broker."""
        self._stopping.set()

    @property
    def busy(self) -> bool:
        """Return whether events are being handled, are due again, or drain.

        Events that cannot be held for now do not count.
        """
        return bool(self._queues.streams - self._stalled) or self._executor.draining

    async def run(self) -> None:
        """Consume until asked to stop."""
        await self._source.start(self._revoked)
        self._observer.emit(ConsumerStarted(self._routes.consumer, tuple(self._routes.topics)))
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._work()) for _ in range(self._settings.concurrency)]
                group.create_task(self._maintenance.run(self._stopping))
                watching = group.create_task(self._executor.wait_for_failure())
                try:
                    await self._receive()
                    await self._finish(workers)
                finally:
                    # A worker may miss its cancellation if its connection is lost at the same moment.
                    self._stopping.set()
                    watching.cancel()
                    await self._enqueue([])
        finally:
            # The task group has ended: no task can start another drain.
            await self._executor.stop()
            await self._source.close()
        self._observer.emit(ConsumerStopped(self._routes.consumer, unhandled=len(self._queues)))

    async def _receive(self) -> None:
        """Fetch deliveries; without room, only keep the connection alive."""
        lost = False
        while not self._stopping.is_set():
            try:
                if lost:
                    await self._source.start(self._revoked)
                received = await self._source.receive(self._room(), self._full())
            except Transient as error:
                lost = True
                await self._drop_all()
                await self._pause(self._executor.health.failed(str(error)))
                continue
            if lost:
                lost = False
                self._executor.health.recovered()
            if received:
                await self._enqueue([decode(delivery) for delivery in received])

    def _room(self) -> int:
        """Return how many deliveries to fetch: at most a quarter of the limit, to leave room for other partitions."""
        in_flight_max = self._settings.in_flight_max
        return max(0, min(in_flight_max - len(self._queues), max(1, in_flight_max // 4)))

    def _full(self) -> frozenset[str]:
        """Return the partitions that have used up their share: a slow partition must not stop other partitions."""
        return self._queues.full(max(1, self._settings.in_flight_max // 2))

    async def _enqueue(self, events: Sequence[ReceivedEvent]) -> None:
        async with self._changed:
            for received in events:
                self._queues.add(received)
            self._changed.notify_all()

    async def _work(self) -> None:
        """Execute ready events until asked to stop."""
        worker = asyncio.current_task()
        assert worker is not None
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._queues.ready or self._stopping.is_set())
                if self._stopping.is_set():
                    return
                events = self._queues.take(self._settings.batch_max)
            self._in_flight[worker] = events
            result = await self._executor.execute(events)
            for received in result.done:
                # Ack last: a crash before the ack delivers again, and the receipt absorbs the duplicate. The other
                # order loses events.
                self._source.ack(received.delivery)
            await self._finish_attempt(events, result)

    async def _finish_attempt(self, events: Sequence[ReceivedEvent], result: AttemptResult) -> None:
        """Remove settled events; let streams with unsettled events rest, and free the remaining streams."""
        streams = {received.stream for received in events}
        async with self._changed:
            self._queues.done(result.done)
            self._executor.forget(self._queues.put_back(result.left))
            self._stalled = (self._stalled - streams) | result.stalled
            if self._settings.ordering is Ordering.STRICT:
                # Sequencing keeps the order, whichever event comes first.
                self._queues.sort(result.delay_seconds)
            self._queues.free(streams - result.delay_seconds.keys())
            self._changed.notify_all()
        for stream, seconds in result.delay_seconds.items():
            asyncio.get_running_loop().call_later(seconds, self._end_delay, stream)

    def _end_delay(self, stream: InboxStream) -> None:
        self._queues.free([stream])
        self._tasks.add(task := asyncio.create_task(self._enqueue([])))
        task.add_done_callback(self._tasks.discard)

    async def _revoked(self, partitions: frozenset[str]) -> None:
        """Release partitions: drop events that have not begun, and wait for events in progress."""
        self._observer.emit(PartitionsRevoked(self._routes.consumer, tuple(sorted(partitions))))
        async with self._changed:
            self._executor.forget(self._queues.drop(partitions))
            await self._changed.wait_for(lambda: not any(self._queues.count(partition) for partition in partitions))

    async def _drop_all(self) -> None:
        """Drop events that have not begun: the connection is lost, and the broker redelivers unacked events."""
        async with self._changed:
            self._executor.forget(self._queues.drop(self._queues.partitions))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _finish(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """Wait for handlers in progress; late handlers are rolled back, and their events are delivered again."""
        async with self._changed:
            self._changed.notify_all()
        _, late = await asyncio.wait(workers, timeout=self._settings.shutdown_timeout_seconds)
        for task in late:
            task.cancel()
            for received in self._in_flight.get(task, []):
                seconds, place = self._settings.shutdown_timeout_seconds, (received.delivery.topic, received.stream.key)
                self._observer.emit(HandlerTimedOut(self._routes.consumer, received.event_id, *place, seconds))


@dataclass(slots=True)
class ConsumerMaintenance:
    """Periodic maintenance of a consumer.

    Every process runs maintenance; the store gives a stream to a single process.
    """

    store: InboxStore
    routes: Routes
    executor: HandlerExecutor
    observer: Observer
    emitted: dict[InboxStream, datetime] = field(default_factory=dict)
    prune_at: float = 0.0

    async def run(self, stopping: asyncio.Event) -> None:
        """Run maintenance until asked to stop."""
        while not stopping.is_set():
            try:
                await self.run_maintenance()
            except OutriderError as error:
                self.executor.health.failed(str(error))
            try:
                async with asyncio.timeout(self.routes.settings.maintenance_interval_seconds):
                    await stopping.wait()
            except TimeoutError:
                continue

    async def run_maintenance(self) -> None:
        """Run maintenance once."""
        for cause in self.routes.settings.drains:
            for stream in await self.store.draining(self.routes.consumer, STREAMS_MAX, cause=cause):
                self.executor.drain(stream)
        if self.routes.settings.ordering is Ordering.STRICT:
            await self._emit_gaps()
        if time.monotonic() >= self.prune_at:
            await self._prune()
            self.prune_at = time.monotonic() + PRUNE_SECONDS

    async def _emit_gaps(self) -> None:
        """Emit every overdue gap once; a stream that waits again is emitted again."""
        seconds = self.routes.settings.gap_timeout_seconds
        found = await self.store.overdue(self.routes.consumer, seconds, STREAMS_MAX)
        for stream, seen, waiting, since in found:
            if self.emitted.get(stream) != since:
                self.observer.emit(GapOverdue(self.routes.consumer, stream.topic, stream.key, seen, waiting))
        self.emitted = {gap.stream: gap.since for gap in found}

    async def _prune(self) -> None:
        settings = self.routes.settings
        pruned = await self.store.prune(
            self.routes.consumer, receipt_days=settings.receipt_days, dead_letter_days=settings.dead_letter_days
        )
        participants = (
            0
            if settings.participant_memory_days is None
            else await self.store.prune_participants(settings.participant_memory_days)
        )
        if any(pruned) or participants:
            self.observer.emit(InboxMaintenanceDone(self.routes.consumer, *pruned, participants))
