"""A short run of the shop, a relay and a consumer in one process; some orders are posted, and one is rejected.

In production the three are processes of their own; see the README beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from examples.fastapi_shop.shop import create_app
from outrider import Event, Inbox, OutriderError, Relay, RelaySettings, app
from outrider.inbox.consumer import Consumer

DEADLINE_SECONDS = 30.0
ORDERS = [
    {"number": "A-1", "customer": "ann", "cents": 4_000},
    {"number": "B-1", "customer": "bob", "cents": 9_000},
    {"number": "A-2", "customer": "ann", "cents": 7_000},  # beyond her credit
    {"number": "A-3", "customer": "ann", "cents": 5_000},
]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    answers: list[tuple[str, int]]
    orders: list[str]
    delivered: list[Event]

    @property
    def fits(self) -> bool:
        """Tell whether exactly the stored orders were delivered as events."""
        return sorted(event.payload["number"] for event in self.delivered) == self.orders


def main() -> None:
    """Run the example; exit with 1 if an order and its event did not share their fate."""
    parser = argparse.ArgumentParser("python -m examples.fastapi_shop", description="A shop that publishes its orders.")
    parser.add_argument("--store", metavar="URL", help="postgresql://... instead of a SQLite file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastapi-shop-", ignore_cleanup_errors=True) as made:
        try:
            report = asyncio.run(run(options.store or f"sqlite:///{made}/shop.db", Path(made)))
        except OutriderError as error:
            raise SystemExit(f"fastapi_shop: {error}") from error
        except TimeoutError:
            raise SystemExit(f"fastapi_shop: not everything was delivered in {DEADLINE_SECONDS:.0f} seconds") from None
    show(report)
    raise SystemExit(0 if report.fits else 1)


def alchemy_url(store: str) -> str:
    """Return the SQLAlchemy URL of a store, with an asynchronous driver.

    >>> alchemy_url("postgresql://app@localhost/shop")
    'postgresql+asyncpg://app@localhost/shop'
    """
    scheme, _, rest = store.partition("://")
    return f"{'sqlite+aiosqlite' if scheme == 'sqlite' else 'postgresql+asyncpg'}://{rest}"


async def run(store: str, folder: Path, posts: Sequence[dict[str, Any]] = ORDERS) -> Report:
    """Post the orders to the shop, and wait for the events of the accepted ones."""
    await app.open_schema(store).migrate()
    shop = create_app(alchemy_url(store))
    heard: asyncio.Queue[Event] = asyncio.Queue()
    transport = httpx.ASGITransport(shop)
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        shop.router.lifespan_context(shop),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
        relaying(store, f"embedded:///{folder}/log.db"),
        consuming(store, f"embedded:///{folder}/log.db", heard),
    ):
        answers = [(post["number"], (await client.post("/orders", json=post)).status_code) for post in posts]
        orders = [order["number"] for order in (await client.get("/orders")).json()]
        delivered = [await heard.get() for _ in orders]
    return Report(answers, orders, [*delivered, *(heard.get_nowait() for _ in range(heard.qsize()))])


@asynccontextmanager
async def relaying(store_url: str, broker_url: str) -> AsyncIterator[None]:
    """Run a relay beside the block, as `outrider relay` does."""
    broker, store = await app.open_broker(broker_url), await app.open_store(store_url)
    relay = Relay(store, broker, RelaySettings(poll_seconds_max=0.1))
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(relay.run())
            try:
                yield
            finally:
                relay.stop()
    finally:
        await broker.close()
        await store.close()


@asynccontextmanager
async def consuming(store_url: str, broker_url: str, heard: asyncio.Queue[Event]) -> AsyncIterator[None]:
    """Run a consumer beside the block, as `outrider consume` does."""
    inbox = Inbox()

    @inbox.handler("order.placed", consumer="billing")
    async def hear(event: Event, tx: Any) -> None:
        heard.put_nowait(event)

    store, routes = await app.open_inbox(store_url), inbox.consumers["billing"]
    consumer = Consumer(app.open_source(broker_url, routes), store, routes)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.run())
            try:
                yield
            finally:
                consumer.stop()
    finally:
        await store.close()


def show(report: Report) -> None:
    """Print the requests, the stored orders and the delivered events."""
    for number, status in report.answers:
        print(f"POST /orders {number}: {status}{'' if status == 201 else ', rolled back'}")
    print(f"GET /orders: {', '.join(report.orders)}")
    for event in report.delivered:
        print(f"delivered: {event.event_type} {json.dumps(event.payload)}")
    if not report.fits:
        print("orders and events differ", file=sys.stderr)
