"""A shop, its stock and its bank: sagas over a real store, a relay, a broker and participants, in one process."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import outrider
from outrider import Event, Inbox, Relay, RelaySettings, RetryPolicy, app
from outrider.inbox.consumer import Consumer
from outrider.saga import Participant, Rejection, Saga, SagaRegistry, SagaSettings, SagaWorker, StepRejected
from outrider.saga.model import SagaRecord
from outrider.saga.store import SagaStore
from outrider.telemetry.events import Observer, SagaEnded
from tests.support.saga_shop import SignallingObserver

SETTINGS = SagaSettings(lease_seconds=1.5, poll_seconds_max=0.1, shutdown_timeout_seconds=2)
QUICK = RetryPolicy(base_seconds=0.05, cap_seconds=0.2, jitter=0, max_attempts=20)
TABLES = ("orders (id text PRIMARY KEY)", "moves (id text, what text)")


@dataclass
class Order:
    """The state of an order."""

    order_id: str
    amount: int = 12
    reservation: str | None = None
    charge: str | None = None


async def execute(tx: Any, sql: str, *args: Any) -> None:
    """Run a statement of the application's, through whichever driver."""
    if isinstance(tx, sqlite3.Connection):
        tx.execute(sql, args)
    else:
        for number in range(1, len(args) + 1):
            sql = sql.replace("?", f"${number}", 1)
        await tx.execute(sql, *args)


class Bank:
    """An outside service that knows a key when it comes again."""

    def __init__(self) -> None:
        self.charges: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.declines: set[str] = set()
        self.silent = asyncio.Event()
        self.called = asyncio.Event()

    async def charge(self, order_id: str, amount: int, key: str) -> str:
        """Charge once for a key; while it is silent, the answer to a first call is lost."""
        self.calls[key] += 1
        if order_id in self.declines:
            raise StepRejected("the card was declined")
        self.charges[key] = amount
        self.called.set()
        if self.silent.is_set() and self.calls[key] == 1:
            await asyncio.Event().wait()
        return f"paid {amount}"


def order_saga(bank: Bank, *, reserve_seconds: float = 30, charge_seconds: float = 10) -> Saga[Order]:
    """Make the saga of the documentation."""
    order = Saga("order", Order)

    # On SQLite the calls of a worker that is lost may wait for as long as a local step may take, and for its lease.
    @order.local(timeout_seconds=5)
    async def create(run: Any, tx: Any) -> None:
        await execute(tx, "INSERT INTO orders (id) VALUES (?)", run.state.order_id)

    @create.compensate()
    async def cancel(run: Any, tx: Any) -> None:
        await execute(tx, "DELETE FROM orders WHERE id = ?", run.state.order_id)

    reserve = order.request(
        *("stock.reserve",),
        topic="stock",
        reply="stock.reserved",
        rejection="stock.refused",
        compensate="stock.release",
        compensated="stock.released",
        timeout_seconds=reserve_seconds,
        retry=QUICK,
        name="reserve",
    )
    reserve.payload(lambda state: {"order": state.order_id})
    reserve.compensation_payload(lambda state: {"order": state.order_id})

    @reserve.on("stock.reserved")
    def reserved(run: Any, reply: Any) -> None:
        run.state.reservation = reply.payload["reservation"]

    @order.call(pivot=True, timeout_seconds=charge_seconds, retry=QUICK)
    async def charge(run: Any) -> None:
        run.state.charge = await bank.charge(run.state.order_id, run.state.amount, run.key)
        run.stage(Event("order.charged", {"order": run.state.order_id}))

    return order


def stock_inbox(sold_out: Iterable[str] = ()) -> Inbox:
    """Make the participant."""
    inbox, participant = Inbox(), Participant("stock")

    async def take(command: Event, tx: Any) -> Event | Rejection:
        order_id = command.payload["order"]
        if order_id in set(sold_out):
            return Rejection(Event("stock.refused", {"why": "sold out"}))
        await execute(tx, "INSERT INTO moves (id, what) VALUES (?, 'taken')", order_id)
        return Event("stock.reserved", {"reservation": f"R-{order_id}"})

    async def put_back(command: Event, tx: Any) -> Event:
        await execute(tx, "INSERT INTO moves (id, what) VALUES (?, 'put back')", command.payload["order"])
        return Event("stock.released", {})

    @inbox.handler("stock.reserve", consumer="stock", topic="stock")
    async def reserve(command: Event, tx: Any) -> None:
        await participant.execute(tx, command, take)

    @inbox.handler("stock.release", consumer="stock", topic="stock")
    async def release(command: Event, tx: Any) -> None:
        await participant.compensate(tx, command, put_back, nothing=Event("stock.released", {}))

    return inbox


@dataclass
class SagaServices:
    """A database, a broker, and what is running."""

    store_url: str
    broker_url: str
    saga: Saga[Order]
    sagas_store: SagaStore
    bank: Bank
    observer: SignallingObserver = field(default_factory=SignallingObserver)

    @asynccontextmanager
    async def working(self, *, lost: bool = False) -> AsyncIterator[SagaWorker]:
        """Run a saga worker, and the consumer of its replies, around the block; one that is lost gives nothing back."""
        sagas, store = SagaRegistry(self.saga), await app.open_sagas(self.store_url)
        worker = SagaWorker(store, sagas, outrider.stage, SETTINGS, self.observer)
        inbox = app.saga_inbox(sagas, observer=self.observer)
        running = asyncio.create_task(worker.run())
        try:
            async with self.consuming(inbox, worker):
                yield worker
        finally:
            running.cancel() if lost else worker.stop()
            [ended] = await asyncio.gather(running, return_exceptions=True)
            await store.close()
        assert ended is None or lost, f"the worker broke: {ended!r}"

    @asynccontextmanager
    async def consuming(self, inbox: Inbox, observer: Observer | None = None) -> AsyncIterator[None]:
        """Run the consumers of an inbox around the block."""
        store = await app.open_inbox(self.store_url)
        consumers = [
            Consumer(app.open_source(self.broker_url, routes), store, routes, observer=observer)
            for routes in inbox.consumers.values()
        ]
        running = [asyncio.create_task(consumer.run()) for consumer in consumers]
        try:
            yield
        finally:
            for consumer in consumers:
                consumer.stop()
            await asyncio.gather(*running)
            await store.close()

    async def start(self, order_id: str) -> UUID:
        """Start a saga, in a transaction as an application has one."""
        async with self.sagas_store.transaction() as tx:
            return await self.saga.start(tx, Order(order_id), correlation_id=order_id)

    async def ended(self, count: int) -> Counter[str]:
        """Wait until so many sagas have ended; return how."""
        await self.observer.until_emitted(SagaEnded, count)
        return Counter(fact.status for fact in self.observer.of(SagaEnded))

    async def rows(self, sql: str) -> list[tuple[Any, ...]]:
        async with self.sagas_store.transaction() as tx:
            conn = tx.connection
            found = conn.execute(sql).fetchall() if isinstance(conn, sqlite3.Connection) else await conn.fetch(sql)
            return [tuple(row) for row in found]

    async def shown(self, saga_id: UUID) -> SagaRecord:
        record = await self.sagas_store.admin.show(saga_id)
        assert record is not None
        return record


@asynccontextmanager
async def run_services(
    store_url: str, broker_url: str, bank: Bank | None = None, **options: Any
) -> AsyncIterator[SagaServices]:
    """Run the services with a relay between them."""
    bank = bank or Bank()
    async with AsyncExitStack() as stack:
        sagas = await app.open_sagas(store_url)
        stack.push_async_callback(sagas.close)
        async with sagas.transaction() as tx:
            for table in TABLES:
                await execute(tx.connection, f"CREATE TABLE {table}")
        store, broker = await app.open_store(store_url), await app.open_broker(broker_url)
        stack.push_async_callback(store.close)
        stack.push_async_callback(broker.close)
        relay = Relay(store, broker, RelaySettings(workers=1))
        running = asyncio.create_task(relay.run())
        try:
            yield SagaServices(store_url, broker_url, order_saga(bank, **options), sagas, bank)
        finally:
            relay.stop()
            await running
