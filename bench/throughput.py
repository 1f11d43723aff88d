"""How fast a backlog drains, and what it costs in write-ahead log: the textbook design beside ours."""

from __future__ import annotations

import asyncio

import asyncpg

from bench import textbook
from bench.load import KEYS, OPEN_TRANSACTION, PAYLOAD, Drain, Tally, hold_transaction, measure
from bench.processes import relays
from outrider import Relay
from outrider.brokers.null import NullBroker
from outrider.stores.postgres import PostgresSchema, PostgresStore

TEXTBOOK = {"textbook, row by row": textbook.row_by_row, "textbook, in batches": textbook.in_batches}
OURS_LEFT = "SELECT count(*) FROM outrider.outbox"
COLUMNS = f"'order.placed', 'order', 'k' || i % {KEYS}, 'orders', {PAYLOAD} FROM generate_series(1, $1::integer) AS i"
FILL_TEXTBOOK = f"INSERT INTO textbook (event_type, aggregate_type, aggregate_id, topic, payload) SELECT {COLUMNS}"
FILL_OURS = f"INSERT INTO outrider.outbox (event_type, aggregate_type, aggregate_id, topic, payload) SELECT {COLUMNS}"


async def run(url: str, events: int, seconds_max: float) -> list[Drain]:
    """Measure every design, alone and with transactions held open."""
    await PostgresSchema(url).migrate()
    results = []
    for open_transaction in OPEN_TRANSACTION:
        results += [await _textbook(url, events, open_transaction, seconds_max, name) for name in TEXTBOOK]
        results += [
            await _ours(url, events, open_transaction, seconds_max, archive=archive) for archive in (True, False)
        ]
    return results + [await _processes(url, events, seconds_max, archive=archive) for archive in (True, False)]


async def _fill(url: str, setup: str, fill: str, table: str, events: int) -> None:
    conn = await asyncpg.connect(url)
    await conn.execute(setup)
    await conn.execute(fill, events)
    await conn.execute(f"VACUUM (ANALYZE) {table}")
    await conn.close()


async def _textbook(url: str, events: int, open_transaction: str, seconds_max: float, name: str) -> Drain:
    async with hold_transaction(url, open_transaction):
        await _fill(url, textbook.SETUP, FILL_TEXTBOOK, "textbook", events)
        return await measure(
            url,
            name,
            open_transaction,
            textbook.LEFT,
            lambda: TEXTBOOK[name](url, NullBroker().publish),
            seconds_max=seconds_max,
        )


async def _ours(url: str, events: int, open_transaction: str, seconds_max: float, *, archive: bool) -> Drain:
    name = f"outrider, {'archive' if archive else 'delete'}"
    async with hold_transaction(url, open_transaction):
        await _fill(url, "TRUNCATE outrider.outbox", FILL_OURS, "outrider.outbox", events)
        store = await PostgresStore.open(url, archive=archive)
        tally = Tally(events)
        relay = Relay(store, NullBroker(), observer=tally)

        async def drain() -> None:
            running = asyncio.create_task(relay.run())
            await tally.reached.wait()
            relay.stop()
            await running

        try:
            return await measure(url, name, open_transaction, OURS_LEFT, drain, seconds_max=seconds_max)
        finally:
            await store.leave(relay.name)
            await store.close()


async def _processes(url: str, events: int, seconds_max: float, *, archive: bool) -> Drain:
    """The same with two relay processes, as `outrider relay --processes 2` runs them."""
    name = f"outrider, {'archive' if archive else 'delete'}, 2 processes"
    await _fill(url, "TRUNCATE outrider.outbox", FILL_OURS, "outrider.outbox", 2 * events)
    async with relays(url, "null://", processes=2, archive=archive) as running:
        # Starting Python is not what is measured: begin at the first movement.
        left = 2 * events - await running.settled()
        return await measure(url, name, "none", OURS_LEFT, lambda: running.settled(left), seconds_max=seconds_max)
