"""Optimistic send: the writer publishes its own events right after the commit; after a failure a relay takes over.

The writer stages a row together with its claim, if no undelivered event lies before the row, and relays skip claimed
rows. After the commit the writer renews the claim by database time, and publishes the batch only if the renewal returns
all of it: otherwise an event could overtake an earlier one whose claim has ended. A transaction that rolled back left
no row; after a commit with an unknown result the writer sends no event. If the writer dies, the claim ends and the
owner of the lane publishes the event.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outrider.brokers.base import Broker, Unanswered, Unknown
from outrider.clock import Clock, SystemClock
from outrider.errors import InvalidSetting, Transient, UsageError
from outrider.event import BAND_NAMES, Event, Message, OutboxRow, Readiness
from outrider.outbox.batch import Batch
from outrider.outbox.model import CLAIM_SECONDS_MAX, PARK, OptimisticClaim, StagedRow, StageRequest
from outrider.outbox.publisher import encode_checked, publish
from outrider.outbox.store import OutboxStore
from outrider.outbox.validation import StagingRules, load_schemas, validate_events
from outrider.redaction import without_values
from outrider.telemetry.events import Observer, Observers, OptimisticSent, StoreUnavailable
from outrider.wire import encode

CLAIM_TIMEOUTS = 2
"""The length of a claim, in publish timeouts."""

Insert = Callable[[Any, StageRequest, OptimisticClaim | None], Awaitable[list[StagedRow]]]
"""Insert events through a connection of any driver."""

InsertSync = Callable[[Any, StageRequest, OptimisticClaim | None], list[StagedRow]]
"""Insert events through a synchronous connection."""

AfterCommit = Callable[[Any, Callable[[], object]], bool]
"""Call a function after the commit of a connection's transaction; return False if the driver has no commit hook."""


@dataclass(slots=True)
class OptimisticBatch:
    """The events that a transaction staged through a writer."""

    writer: OptimisticWriter
    claim: OptimisticClaim
    claimed_ids: list[UUID] = field(default_factory=list)
    staged: bool = False

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events; the writer publishes them right after the commit."""
        return await self.writer.stage(conn, self, events)

    def stage_sync(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events through a synchronous connection, such as Django's::

        with transaction.atomic():
            outbox = writer.enlist(connection)
            outbox.stage_sync(connection, Event("order.placed", {"id": 7}, aggregate_id="7"))
        """
        return self.writer.stage_sync(conn, self, events)


class OptimisticWriter:
    """Stages events and publishes them after the commit, without waiting for a relay.

    Pass the transaction to the writer. The writer enters the transaction, and publishes in the background after the
    commit::

        async with writer.transaction(conn.transaction()) as outbox:
            await conn.execute("INSERT INTO orders (id) VALUES ($1)", order_id)
            await outbox.stage(conn, Event("order.placed", {"id": order_id}, aggregate_id=order_id))

    If the driver has a commit hook, call `enlist` with the connection or session instead. `enlist` needs
    `after_commit`, and synchronous code needs `insert_sync`. `loop` is the event loop of store, broker and sends; the
    default is the loop that runs when the writer is created::

        outbox = outrider.Outbox()
        writer = OptimisticWriter(
            store, broker, outbox.insert, insert_sync=outbox.insert_sync, after_commit=after_commit, loop=shared().loop
        )
    """

    def __init__(
        self,
        store: OutboxStore,
        broker: Broker,
        insert: Insert,
        *,
        insert_sync: InsertSync | None = None,
        after_commit: AfterCommit | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        rules: StagingRules | None = None,
        enabled: bool = True,
        timeout_seconds: float = 2.0,
        pause_seconds: float = 5.0,
        observer: Observer | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not 0 < timeout_seconds * CLAIM_TIMEOUTS <= CLAIM_SECONDS_MAX:
            most = CLAIM_SECONDS_MAX / CLAIM_TIMEOUTS
            raise InvalidSetting(f"timeout_seconds = {timeout_seconds!r} cannot work; use a number above 0 to {most:g}")
        self.enabled = enabled
        self._store, self._broker, self._insert = store, broker, insert
        self._insert_sync, self._after_commit, self._loop = insert_sync, after_commit, loop or _running_loop()
        self._rules = rules or StagingRules()
        self._timeout_seconds, self._pause_seconds = timeout_seconds, pause_seconds
        self._observer, self._clock = observer or Observers(), clock or SystemClock()
        self._name = f"writer-{random.Random().getrandbits(48):012x}"
        self._paused_until = float("-inf")
        self._sending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(self, transaction: AbstractAsyncContextManager[Any]) -> AsyncIterator[OptimisticBatch]:
        """Run a transaction; after a successful commit, publish the staged events in the background."""
        batch = self.batch()
        async with transaction:
            yield batch
        # Not reached if the commit raised: the result is unknown, and the claim ends by itself.
        self._send_soon(batch)

    def enlist(self, conn: Any) -> OptimisticBatch:
        """Begin a batch that is published after the connection's commit, by the driver's commit hook::

        async with Session.begin() as session:
            outbox = writer.enlist(session)
            await outbox.stage(session, Event("order.placed", {"id": 7}, aggregate_id="7"))
        """
        if self._after_commit is None or self._loop is None:
            raise UsageError("this writer has no commit hook; create it with after_commit=... and loop=...")
        batch, loop = self.batch(), self._loop
        if not self._after_commit(conn, lambda: loop.call_soon_threadsafe(self._send_soon, batch)):
            kind = f"{type(conn).__module__}.{type(conn).__qualname__}"
            raise UsageError(f"a {kind} does not report its commit; use: async with writer.transaction(...)")
        return batch

    def batch(self) -> OptimisticBatch:
        """Begin a batch by hand, for transactions that are not context managers; call `send` after the commit."""
        # The claim outlives the send, so that a relay never fetches a row with a publish in progress.
        return OptimisticBatch(self, OptimisticClaim(self._name, self._timeout_seconds * CLAIM_TIMEOUTS))

    async def stage(self, conn: Any, batch: OptimisticBatch, events: Sequence[Event]) -> list[UUID]:
        """Stage events in the caller's transaction, claimed by the writer where order allows a claim."""
        await load_schemas(self._rules, events)
        request = validate_events(events, self._rules)
        return _record_staged(batch, request, await self._insert(conn, request, self._claim_for(batch, request)))

    def stage_sync(self, conn: Any, batch: OptimisticBatch, events: Sequence[Event]) -> list[UUID]:
        """Stage events through a synchronous connection."""
        if self._insert_sync is None:
            raise UsageError("this writer stages asynchronously only; create it with insert_sync=outbox.insert_sync")
        request = validate_events(events, self._rules)
        return _record_staged(batch, request, self._insert_sync(conn, request, self._claim_for(batch, request)))

    async def send(self, batch: OptimisticBatch) -> None:
        """Publish a committed batch. The relay delivers the events that fail here."""
        try:
            if batch.claimed_ids:
                await self._send(batch)
            elif batch.staged:
                await self._store.notify()
        except Transient as error:
            self._observer.emit(StoreUnavailable(self._name, without_values(error)))

    async def close(self) -> None:
        """Wait for the sends in progress."""
        # A send that another thread has just requested begins first.
        await asyncio.sleep(0)
        await asyncio.gather(*self._sending)

    def _send_soon(self, batch: OptimisticBatch) -> None:
        task = asyncio.get_running_loop().create_task(self.send(batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _claim_for(self, batch: OptimisticBatch, request: StageRequest) -> OptimisticClaim | None:
        # An event that is not due yet must not be published early, and later events must not overtake it.
        # An increasing field is judged by the relay, which knows the value before.
        payloads = self._rules.payloads
        left_to_relay = any(
            new.available_at is not None or (payloads is not None and payloads.increasing_of(new.event_type))
            for new in (*request.plain, *request.numbered)
        )
        return batch.claim if self._may_send() and not left_to_relay else None

    def _may_send(self) -> bool:
        return self.enabled and self._clock.boot_seconds() >= self._paused_until

    async def _send(self, batch: OptimisticBatch) -> None:
        started = self._clock.boot_seconds()
        events = await self._store.renew_claim(batch.claim, batch.claimed_ids)
        whole = {event.event_id for event in events} == set(batch.claimed_ids)
        confirmed = await self._publish(events, started + self._timeout_seconds) if whole else []
        yielded = [event.event_id for event in events if event.event_id not in confirmed]
        await self._store.settle_claim(batch.claim, confirmed, yielded)
        if yielded:
            await self._store.notify()
        self._observer.emit(OptimisticSent(len(confirmed), len(yielded), self._clock.boot_seconds() - started))

    async def _publish(self, events: list[OutboxRow], deadline: float) -> list[UUID]:
        """Publish events until the deadline; return the confirmed events. A stream ends at its first failure."""
        # The writer's own claim keeps relays away from these rows.
        batch = Batch.plan([event._replace(readiness=Readiness.READY) for event in events])
        ordered = self._broker.capabilities.ordered
        if self._rules.payloads is not None:
            pairs = [(event.event_type, event.schema_version) for event in events]
            await self._rules.payloads.load(pairs, payloads=[event.payload for event in events])
        while (seconds := deadline - self._clock.boot_seconds()) > 0:
            wave = batch.next_wave(len(events), ordered=ordered)
            if wave is None:
                break
            try:
                messages = [self._message(event) for event in wave.events]
            except Exception:
                # An event that cannot be published is a matter for the relay, which dead-letters it.
                break
            results = await publish(self._broker, messages, seconds)
            recorded = batch.record(wave, results, lambda *_: PARK)
            if any(isinstance(run.failure, Unknown | Unanswered) for run in recorded):
                self._pause()
        return [event.event_id for event in batch.settlements.confirmed]

    def _message(self, event: OutboxRow) -> Message:
        band = BAND_NAMES[event.lane // self._store.lanes]
        payloads = self._rules.payloads
        topic = event.topic
        return encode(event, topic, band) if payloads is None else encode_checked(payloads, event, topic, band)

    def _pause(self) -> None:
        """Leave the next events to the relay for a while, because the broker fails."""
        self._paused_until = self._clock.boot_seconds() + self._pause_seconds


def _record_staged(batch: OptimisticBatch, request: StageRequest, inserted: list[StagedRow]) -> list[UUID]:
    batch.claimed_ids += [row.event_id for row in inserted if row.optimistic]
    batch.staged |= bool(inserted)
    return list(request.ids)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
