"""Optimistic send: the writer publishes its own events straight after the commit; a relay takes over if it cannot.

The row is staged already held by the writer, so no relay takes it, and only where nothing undelivered lies before it.
After the commit the hold is renewed by database time; only rows that the renewal returns are published. A transaction
that rolled back left no row, and a commit whose outcome is unknown is not followed by a send. If the writer dies, the
hold lapses and the lane's owner publishes the event like any other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outrider.broker import Broker
from outrider.clock import Clock, SystemClock
from outrider.codec.seal import seal
from outrider.errors import Misuse, Transient
from outrider.event import BAND_NAMES, Event, StagedEvent, default_topic
from outrider.observer import Observer, Observers, OptimisticSent, StoreTroubled
from outrider.outbox.course import Course
from outrider.outbox.stage import StagingRules, drafts
from outrider.outbox.streams import Run, TopicRule, stream_of
from outrider.outbox.turnstile import publish
from outrider.outcome import Confirmed, Unresolved, Verdict
from outrider.store import Drafts, Hold, Placed, Store

Place = Callable[[Any, Drafts, Hold | None], Awaitable[list[Placed]]]
"""Insert drafts through a connection of whatever driver."""

PlaceSync = Callable[[Any, Drafts, Hold | None], list[Placed]]
"""The same, through a connection that is not asynchronous."""

AfterCommit = Callable[[Any, Callable[[], object]], bool]
"""Call something once a connection's transaction has committed; False if nobody can tell."""


@dataclass(slots=True)
class Batch:
    """What one transaction staged through a writer."""

    writer: OptimisticWriter
    hold: Hold
    held: list[UUID] = field(default_factory=list)
    staged: bool = False

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events; they go out as soon as the transaction has committed."""
        return await self.writer.stage(conn, self, events)

    def stage_sync(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events through a connection that is not asynchronous, such as Django's::

        with transaction.atomic():
            outbox = writer.enlist(connection)
            outbox.stage_sync(connection, Event("order.placed", {"id": 7}, aggregate_id="7"))
        """
        return self.writer.stage_sync(conn, self, events)


class OptimisticWriter:
    """Stages events and publishes them after the commit, without waiting for a relay.

    Give it the transaction; it enters it, and sends in the background once it has committed::

        async with writer.transaction(conn.transaction()) as outbox:
            await conn.execute("INSERT INTO orders (id) VALUES ($1)", order_id)
            await outbox.stage(conn, Event("order.placed", {"id": order_id}, aggregate_id=order_id))

    Where the driver can tell of the commit, it is enough to `enlist` what the transaction belongs to. For that, and for
    code without an event loop, it needs to know how to place and to be told; `loop` is the one that it sends on, and
    that store and broker live on, if there is none where it is made::

        outbox = outrider.Outbox()
        writer = OptimisticWriter(
            store, broker, outbox.place, place_sync=outbox.place_sync, after_commit=after_commit, loop=shared().loop
        )
    """

    def __init__(
        self,
        store: Store,
        broker: Broker,
        place: Place,
        *,
        place_sync: PlaceSync | None = None,
        after_commit: AfterCommit | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        rules: StagingRules | None = None,
        enabled: bool = True,
        timeout_seconds: float = 2.0,
        pause_seconds: float = 5.0,
        observer: Observer | None = None,
        clock: Clock | None = None,
        rule: TopicRule = default_topic,
    ) -> None:
        self.enabled = enabled
        self._store, self._broker, self._place = store, broker, place
        self._place_sync, self._after_commit, self._loop = place_sync, after_commit, loop or _running_loop()
        self._rules = rules or StagingRules()
        self._timeout_seconds, self._pause_seconds = timeout_seconds, pause_seconds
        self._observer, self._clock, self._rule = observer or Observers(), clock or SystemClock(), rule
        self._name = f"writer-{random.Random().getrandbits(48):012x}"
        self._paused_until = float("-inf")
        self._sending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(self, transaction: AbstractAsyncContextManager[Any]) -> AsyncIterator[Batch]:
        """Run a transaction; if its commit succeeds, send what it staged, in the background."""
        batch = self.batch()
        async with transaction:
            yield batch
        # Not reached when the commit raised: then nobody knows, and the hold lapses by itself.
        self._send_soon(batch)

    def enlist(self, conn: Any) -> Batch:
        """Begin a batch that is sent once the connection's transaction has committed, as its driver tells::

        async with Session.begin() as session:
            outbox = writer.enlist(session)
            await outbox.stage(session, Event("order.placed", {"id": 7}, aggregate_id="7"))
        """
        if self._after_commit is None or self._loop is None:
            raise Misuse("this writer cannot be told of commits; make it with after_commit=... and loop=...")
        batch, loop = self.batch(), self._loop
        if not self._after_commit(conn, lambda: loop.call_soon_threadsafe(self._send_soon, batch)):
            kind = f"{type(conn).__module__}.{type(conn).__qualname__}"
            raise Misuse(f"a {kind} does not tell when it has committed; use: async with writer.transaction(...)")
        return batch

    def batch(self) -> Batch:
        """Begin a batch by hand, for transactions that are not context managers; call `send` after the commit."""
        # The hold outlives the send, so that a relay never meets a row whose publish is still under way.
        return Batch(self, Hold(self._name, self._timeout_seconds * 2))

    async def stage(self, conn: Any, batch: Batch, events: Sequence[Event]) -> list[UUID]:
        """Stage events in the caller's transaction, held for this writer where order allows it."""
        checked = drafts(events, self._rules)
        return _noted(batch, checked, await self._place(conn, checked, self._hold_for(batch, checked)))

    def stage_sync(self, conn: Any, batch: Batch, events: Sequence[Event]) -> list[UUID]:
        """Do the same through a connection that is not asynchronous."""
        if self._place_sync is None:
            raise Misuse("this writer stages asynchronously only; make it with place_sync=outbox.place_sync")
        checked = drafts(events, self._rules)
        return _noted(batch, checked, self._place_sync(conn, checked, self._hold_for(batch, checked)))

    async def send(self, batch: Batch) -> None:
        """Publish a committed batch. Whatever goes wrong, the relay will deliver it."""
        try:
            if batch.held:
                await self._send(batch)
            elif batch.staged:
                await self._store.hint()
        except Transient as error:
            self._observer.notice(StoreTroubled(self._name, str(error)))

    async def close(self) -> None:
        """Wait for sends that are under way."""
        # One that another thread has just asked for begins first.
        await asyncio.sleep(0)
        await asyncio.gather(*self._sending)

    def _send_soon(self, batch: Batch) -> None:
        task = asyncio.get_running_loop().create_task(self.send(batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _hold_for(self, batch: Batch, checked: Drafts) -> Hold | None:
        # One that is not due yet must not go out early, and what follows it must not overtake it.
        deferred = any(draft.available_at is not None for draft in (*checked.plain, *checked.numbered))
        return batch.hold if self._willing() and not deferred else None

    def _willing(self) -> bool:
        return self.enabled and self._clock.boot_seconds() >= self._paused_until

    async def _send(self, batch: Batch) -> None:
        begun = self._clock.boot_seconds()
        events = await self._store.renew_hold(batch.hold, batch.held)
        confirmed: list[UUID] = []
        await self._publish(events, confirmed, begun + self._timeout_seconds)
        yielded = [event.event_id for event in events if event.event_id not in confirmed]
        await self._store.settle_hold(batch.hold, confirmed, yielded)
        if yielded:
            await self._store.hint()
        self._observer.notice(OptimisticSent(len(confirmed), len(yielded), self._clock.boot_seconds() - begun))

    async def _publish(self, events: list[StagedEvent], confirmed: list[UUID], deadline: float) -> None:
        course = Course()
        for event in events:
            course.ready.setdefault(stream_of(event, self._rule), []).append(event)
        while course.ready and (seconds := deadline - self._clock.boot_seconds()) > 0:
            wave = course.next_wave(len(events), ordered=self._broker.traits.ordered)
            bands = [BAND_NAMES[run.stream.lane // self._store.lanes] for run in wave]
            messages = [seal(event, r.stream.topic, b) for r, b in zip(wave, bands, strict=True) for event in r.events]
            verdicts = iter(await publish(self._broker, messages, seconds))
            for run in wave:
                self._note(course, run, [next(verdicts) for _ in run.events], confirmed)

    def _note(self, course: Course, run: Run, verdicts: list[Verdict], confirmed: list[UUID]) -> None:
        """Stop a stream at its first failure; what follows it is the relay's."""
        for event, verdict in zip(run.events, verdicts, strict=True):
            if not isinstance(verdict, Confirmed):
                course.leave(run.stream)
                if isinstance(verdict, Unresolved):
                    self._pause()
                return
            confirmed.append(event.event_id)

    def _pause(self) -> None:
        """The broker is in trouble: leave the next events to the relay, which knows how to wait."""
        self._paused_until = self._clock.boot_seconds() + self._pause_seconds


def _noted(batch: Batch, checked: Drafts, placed: list[Placed]) -> list[UUID]:
    batch.held += [row.event_id for row in placed if row.optimistic]
    batch.staged |= bool(placed)
    return list(checked.ids)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
