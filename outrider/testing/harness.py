"""The harness of the store contract suites: transactions, a clock, and relays that a test runs step by step."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar
from uuid import UUID, uuid4

import outrider
from outrider.brokers.base import Broker
from outrider.event import SKIPPED_TYPE, Delivery, Event
from outrider.inbox.consumer import ConsumerMaintenance
from outrider.inbox.executor import HandlerExecutor
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.inbox.store import InboxStore
from outrider.outbox.optimistic import OptimisticWriter
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.store import OutboxStore
from outrider.retry import RetryPolicy
from outrider.testing.fakes import ManualClock, RecordingObserver
from outrider.wire import decode

PASSES_MAX = 10_000

T = TypeVar("T")

TOPIC = "orders"

TYPE = "order.placed"


class Harness(ABC):
    """A store under test. Third parties implement the abstract methods and subclass `StoreContract`.

    `concurrent` says whether two transactions can be open for writing at once, `savepoints` whether a part of a
    transaction can be rolled back.
    """

    store: OutboxStore
    concurrent = True
    savepoints = True

    def __init__(self, store: OutboxStore, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.observer = RecordingObserver()

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a business transaction; its value can be passed to `outrider.stage`."""

    @abstractmethod
    def savepoint(self, conn: Any) -> AbstractAsyncContextManager[Any]:
        """Open a savepoint in a transaction; it rolls back when the block raises."""

    async def transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run work in a separate transaction, and repeat the transaction as often as the database requires."""
        async with self.transaction() as conn:
            return await work(conn)

    async def advance(self, *, seconds: float) -> None:
        """Advance the clock, also for the database."""
        self.clock.advance(seconds=seconds)

    async def stage(self, *events: Event) -> list[UUID]:
        """Stage events in a separate transaction."""
        return await self.transact(lambda conn: outrider.stage(conn, *events))

    async def insert(self, event_id: UUID, event_type: str, payload: str, key: str, attempts: int = 0) -> None:
        """Insert a row with only these columns, as another program would: without a topic."""
        raise NotImplementedError("override `insert`, so that the suite can test rows without a topic")

    async def remove(self, place: str, event_id: UUID, *, kind: str | None = None) -> None:
        """Delete an event from `outbox`, `archive` or `dead_letters`, or its entries of a kind from `journal`.

        The rows are deleted as a person would do it by hand, past the store.
        """
        raise NotImplementedError("override `remove`, so that the suite can test what the journal finds")

    def relay(self, broker: Broker, *, seed: int = 0, **settings: Any) -> Relay:
        """Make a relay that a test runs step by step. Retries have no jitter, to make their times predictable."""
        plain = {"workers": 1, "retry": RetryPolicy(jitter=0, max_attempts=3)}
        made = RelaySettings(**{**plain, **settings})
        rng = random.Random(seed)
        return Relay(self.store, broker, made, clock=self.clock, observer=self.observer, rng=rng)

    def writer(self, broker: Broker, **options: Any) -> OptimisticWriter:
        """Make an optimistic writer."""
        insert = outrider.Outbox().insert
        return OptimisticWriter(self.store, broker, insert, clock=self.clock, observer=self.observer, **options)

    async def works(self, *relays: Relay) -> int:
        """Run the relays in turn until all are idle; return the number of passes that changed a row."""
        for passes in range(PASSES_MAX):
            for relay in relays:
                await relay.heartbeat()
            if not any([await relay.run_once() for relay in relays]):
                return passes
        raise AssertionError(f"still busy after {PASSES_MAX} passes")

    async def works_for(self, relay: Relay, *, seconds: float, step_seconds: float = 10.0) -> None:
        """Run a relay with its probes and heartbeats while time passes."""
        for _ in range(int(seconds / step_seconds)):
            await self.advance(seconds=step_seconds)
            await relay.probe()
            await self.works(relay)


def order(number: int, key: str = "A", **fields: Any) -> Event:
    """Make an event whose payload contains the position in its stream."""
    return Event("order.changed", {"n": number}, **{"aggregate_type": "order", "aggregate_id": key, **fields})


def orders(count: int, key: str = "A", **fields: Any) -> list[Event]:
    """Make consecutive events of one stream."""
    return [order(number, key, **fields) for number in range(1, count + 1)]


def numbers(messages: list[Any], key: str = "A") -> list[int]:
    """Return the numbers of the delivered events of a key, first deliveries only, in order."""
    found = [json.loads(message.body)["n"] for message in messages if message.key == key and message.body != b"null"]
    return list(dict.fromkeys(found))


def delivery(
    number: int | None = None, *, key: str = "A-1", event_id: UUID | None = None, place: str = "", **headers: str
) -> Delivery:
    """Make a delivery as the relay would have published it; the sequence is optional.

    >>> delivery(3).headers["sequence"]
    b'3'
    """
    said = {"message_id": str(event_id or uuid4()), "event_type": TYPE, "key": key, **headers}
    if number is not None:
        said |= {"sequence": str(number), "gapless": headers.get("gapless", "true")}
    body = json.dumps({"number": number}).encode()
    return Delivery(TOPIC, key.encode(), body, {k: v.encode() for k, v in said.items()}, position=place)


def marker(number: int, *, key: str = "A-1") -> Delivery:
    """Make the marker that is published in place of a skipped event."""
    return delivery(number, key=key, event_type=SKIPPED_TYPE, skipped=str(uuid4()), gapless="")


class InboxBench(ABC):
    """An inbox store under test. Third parties implement the abstract methods and subclass `InboxContract`.

    `concurrent` says whether two transactions can be open for writing at once.
    """

    concurrent = True

    def __init__(self, store: InboxStore, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.observer = RecordingObserver()
        self.failing: dict[str, list[BaseException]] = {}

    @abstractmethod
    async def effect(self, tx: Any, text: str) -> None:
        """Write an effect in the transaction."""

    @abstractmethod
    async def effects(self) -> list[str]:
        """Return the committed effects, in order."""

    @abstractmethod
    async def end(self, tx: Any, *, commit: bool) -> None:
        """End the transaction, as a handler must not do."""

    @abstractmethod
    async def staged(self) -> list[dict[str, str]]:
        """Return the headers of the events staged in the outbox of the same database, in order."""

    async def advance(self, *, seconds: float) -> None:
        """Advance the clock, also for the database."""
        self.clock.advance(seconds=seconds)

    async def handler(self, event: Event, tx: Any) -> None:
        """Write `key:sequence` as the effect, then raise the next error given to `fail`, if any."""
        name = f"{event.key}:{event.sequence}"
        await self.effect(tx, name)
        if errors := self.failing.get(name):
            raise errors.pop(0)

    def fail(self, name: str, *errors: BaseException) -> None:
        """Make the handler raise these errors in turn for the event."""
        self.failing[name] = list(errors)

    def routes(self, consumer: str = "billing", **settings: Any) -> Routes:
        """Make the routes of a consumer with the test's handler."""
        plain = {"retry": RetryPolicy(base_seconds=0.01, cap_seconds=0.01, jitter=0, max_attempts=3)}
        return Routes(consumer, ConsumerSettings(**{**plain, **settings}), {(TOPIC, TYPE): Route(self.handler)})

    def consumer(self, consumer: str = "billing", **settings: Any) -> ConsumerHarness:
        """Make a consumer that a test runs step by step."""
        return ConsumerHarness(self, self.routes(consumer, **settings))


class ConsumerHarness:
    """A consumer without a source: the test delivers the events."""

    def __init__(self, bench: InboxBench, routes: Routes) -> None:
        self._bench = bench
        self.routes = routes
        self.executor = HandlerExecutor(bench.store, routes, bench.observer, random.Random(0))
        self._maintenance = ConsumerMaintenance(bench.store, routes, self.executor, bench.observer)

    async def deliver(self, *deliveries: Delivery) -> int:
        """Handle deliveries together; return how many may be acked."""
        result = await self.executor.execute([decode(delivery) for delivery in deliveries])
        return len(result.done)

    async def deliver_all(self, deliveries: Sequence[Delivery], *, times: int = 20) -> None:
        """Deliver events one after another, each until it may be acked; then run all drains."""
        for one in deliveries:
            for _ in range(times):
                if await self.deliver(one):
                    break
            else:
                raise AssertionError(f"{one} was not done with after {times} attempts")
            await self.drain()

    async def drain(self) -> None:
        """Run all drains to their end, including drains that another process left behind."""
        await self.executor.wait_for_drains()
        await self._maintenance.run_maintenance()
        await self.executor.wait_for_drains()

    async def run_maintenance(self) -> None:
        """Run maintenance once."""
        await self._maintenance.run_maintenance()
