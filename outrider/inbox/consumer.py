"""The consumer: receives, lets keys be handled side by side and each in order, acks what is committed.

Trouble is told apart. A handler that raises is charged an attempt and tried again in place, while its key waits; then
the event is buried. A store or a broker that does not answer charges nothing and is waited for.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from outrider.codec.open import open_delivery
from outrider.delivery import Arrival, InboxStream
from outrider.errors import Transient
from outrider.inbox.handling import Handling, Tried
from outrider.inbox.lineup import Lineup
from outrider.inbox.router import Routes
from outrider.inbox.settings import Gate
from outrider.inbox.upkeep import Upkeep
from outrider.inbox_store import InboxStore
from outrider.observer import ConsumerStarted, ConsumerStopped, HandlerCutOff, Observer, Observers, ShardsRevoked
from outrider.source import Source


class Consumer:
    """Runs the handlers of one consumer over one source. Refuses handlers that cannot work with the store."""

    def __init__(
        self,
        source: Source,
        store: InboxStore,
        routes: Routes,
        *,
        observer: Observer | None = None,
        chance: random.Random | None = None,
    ) -> None:
        routes.check(store)
        self._source, self._settings = source, routes.settings
        self._routes = routes
        self._observer = observer or Observers()
        self._handling = Handling(store, routes, self._observer, chance or random.Random())
        self._upkeep = Upkeep(store, routes, self._handling, self._observer)
        self._lineup = Lineup()
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stalled: set[InboxStream] = set()
        self._under_way: dict[asyncio.Task[None], list[Arrival]] = {}

    def stop(self) -> None:
        """Ask for a clean stop: what is being handled is finished and acked, the rest stays with the broker."""
        self._stopping.set()

    @property
    def busy(self) -> bool:
        """Tell whether something is being handled, is due again, or drains; not what finds no room to wait in."""
        return bool(self._lineup.lines - self._stalled) or self._handling.draining

    async def run(self) -> None:
        """Consume until asked to stop."""
        await self._source.start(self._revoked)
        self._observer.notice(ConsumerStarted(self._routes.consumer, tuple(self._routes.topics)))
        try:
            async with asyncio.TaskGroup() as group:
                hands = [group.create_task(self._work()) for _ in range(self._settings.concurrency)]
                group.create_task(self._upkeep.run(self._stopping))
                watching = group.create_task(self._handling.broken())
                try:
                    await self._receive()
                    await self._finish(hands)
                finally:
                    # A worker may miss that it is cancelled, when its connection is lost at that moment.
                    self._stopping.set()
                    watching.cancel()
                    await self._line_up([])
        finally:
            # Only now does nobody start another drain.
            await self._handling.stop()
            await self._source.close()
        self._observer.notice(ConsumerStopped(self._routes.consumer, unhandled=len(self._lineup)))

    async def _receive(self) -> None:
        """Fetch deliveries; while there is no room, only keep the connection alive."""
        lost = False
        while not self._stopping.is_set():
            try:
                if lost:
                    await self._source.start(self._revoked)
                received = await self._source.receive(self._room(), self._full())
            except Transient as error:
                lost = True
                await self._forget()
                await self._pause(self._handling.trouble(str(error)))
                continue
            if lost:
                lost = False
                self._handling.well()
            if received:
                await self._line_up([open_delivery(delivery) for delivery in received])

    def _room(self) -> int:
        """Return how many may come. A quarter at a time, so that no shard fills the whole before it counts as full."""
        in_flight_max = self._settings.in_flight_max
        return max(0, min(in_flight_max - len(self._lineup), max(1, in_flight_max // 4)))

    def _full(self) -> frozenset[str]:
        """Name the shards that have their share of what may be in flight: a slow one must not stop the others."""
        return self._lineup.full(max(1, self._settings.in_flight_max // 2))

    async def _line_up(self, arrivals: Sequence[Arrival]) -> None:
        async with self._changed:
            for arrival in arrivals:
                self._lineup.add(arrival)
            self._changed.notify_all()

    async def _work(self) -> None:
        """Handle what is ready, until asked to stop."""
        hand = asyncio.current_task()
        assert hand is not None
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._lineup.ready or self._stopping.is_set())
                if self._stopping.is_set():
                    return
                arrivals = self._lineup.take(self._settings.batch_max)
            self._under_way[hand] = arrivals
            tried = await self._handling.handle(arrivals)
            for arrival in tried.done:
                # Last: a crash before this delivers again, and the receipt absorbs it. The other order loses events.
                self._source.ack(arrival.delivery)
            await self._give_back(arrivals, tried)

    async def _give_back(self, arrivals: Sequence[Arrival], tried: Tried) -> None:
        """Forget what is done; let lines with something left rest, and the others go on."""
        lines = {arrival.stream for arrival in arrivals}
        async with self._changed:
            self._lineup.done(tried.done)
            self._handling.forget(self._lineup.put_back(tried.left))
            self._stalled = (self._stalled - lines) | tried.stalled
            if self._settings.gate is Gate.STRICT:
                # The gate keeps the order, whatever comes first.
                self._lineup.sort(tried.rest_seconds)
            self._lineup.free(lines - tried.rest_seconds.keys())
            self._changed.notify_all()
        for line, seconds in tried.rest_seconds.items():
            asyncio.get_running_loop().call_later(seconds, self._rested, line)

    def _rested(self, line: InboxStream) -> None:
        self._lineup.free([line])
        self._tasks.add(task := asyncio.create_task(self._line_up([])))
        task.add_done_callback(self._tasks.discard)

    async def _revoked(self, shards: frozenset[str]) -> None:
        """Let go of shards: forget what has not begun, and wait for what has."""
        self._observer.notice(ShardsRevoked(self._routes.consumer, tuple(sorted(shards))))
        async with self._changed:
            self._handling.forget(self._lineup.drop(shards))
            await self._changed.wait_for(lambda: not any(self._lineup.count(shard) for shard in shards))

    async def _forget(self) -> None:
        """Forget what has not begun: the connection is lost, and everything that is not acked comes again."""
        async with self._changed:
            self._handling.forget(self._lineup.drop(self._lineup.shards))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _finish(self, hands: Sequence[asyncio.Task[None]]) -> None:
        """Let what is being handled end; what takes too long is undone, and delivered again."""
        async with self._changed:
            self._changed.notify_all()
        _, late = await asyncio.wait(hands, timeout=self._settings.stop_seconds)
        for task in late:
            task.cancel()
            for arrival in self._under_way.get(task, []):
                seconds, place = self._settings.stop_seconds, (arrival.delivery.topic, arrival.stream.key)
                self._observer.notice(HandlerCutOff(self._routes.consumer, arrival.event_id, *place, seconds))
