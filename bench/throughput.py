"""How fast a backlog drains, and what it costs in write-ahead log: the textbook design beside ours."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

import asyncpg

from bench import textbook
from bench.load import HELD, KEYS, PAYLOAD, Drain, holding, measure
from outrider import Relay, RelaySettings
from outrider.brokers.null import NullBroker
from outrider.stores.postgres import PostgresSchema, PostgresStore

OURS_LEFT = "SELECT count(*) FROM outrider.outbox"
COLUMNS = f"'order.placed', 'order', 'k' || i % {KEYS}, 'orders', {PAYLOAD} FROM generate_series(1, $1::integer) AS i"
FILL_TEXTBOOK = f"INSERT INTO textbook (event_type, aggregate_type, aggregate_id, topic, payload) SELECT {COLUMNS}"
FILL_OURS = f"INSERT INTO outrider.outbox (event_type, aggregate_type, aggregate_id, topic, payload) SELECT {COLUMNS}"


async def run(url: str, events: int, seconds_max: float) -> list[Drain]:
    """Measure every design, alone and with transactions held open."""
    await PostgresSchema(url).migrate()
    results = []
    for held in HELD:
        results += [await _textbook(url, events, held, seconds_max)]
        results += [await _ours(url, events, held, seconds_max, archive=archive) for archive in (True, False)]
    return results + [await _processes(url, events, seconds_max, archive=archive) for archive in (True, False)]


async def _fill(url: str, setup: str, fill: str, table: str, events: int) -> None:
    conn = await asyncpg.connect(url)
    await conn.execute(setup)
    await conn.execute(fill, events)
    await conn.execute(f"VACUUM (ANALYZE) {table}")
    await conn.close()


async def _textbook(url: str, events: int, held: str, seconds_max: float) -> Drain:
    async with holding(url, held):
        await _fill(url, textbook.SETUP, FILL_TEXTBOOK, "textbook", events)
        return await measure(
            url,
            "textbook",
            held,
            textbook.LEFT,
            lambda: textbook.relay(url, NullBroker().publish),
            seconds_max=seconds_max,
        )


async def _ours(url: str, events: int, held: str, seconds_max: float, *, archive: bool) -> Drain:
    name = f"outrider, {'archive' if archive else 'delete'}"
    async with holding(url, held):
        await _fill(url, "TRUNCATE outrider.outbox", FILL_OURS, "outrider.outbox", events)
        store = await PostgresStore.open(url, archive=archive)
        relay = Relay(store, NullBroker(), RelaySettings(batch_max=2_000, in_flight_max=2_000))
        try:
            return await measure(url, name, held, OURS_LEFT, relay.run, seconds_max=seconds_max)
        finally:
            await store.leave(relay.name)
            await store.close()


async def _processes(url: str, events: int, seconds_max: float, *, archive: bool) -> Drain:
    """The same with two relay processes, as `outrider relay --processes 2` runs them."""
    name = f"outrider, {'archive' if archive else 'delete'}, 2 processes"
    await _fill(url, "TRUNCATE outrider.outbox", FILL_OURS, "outrider.outbox", 2 * events)
    with _relays(url, archive=archive):
        return await measure(url, name, "none", OURS_LEFT, _forever, seconds_max=seconds_max, warm=True)


async def _forever() -> None:
    await asyncio.Event().wait()


@contextmanager
def _relays(url: str, *, archive: bool) -> Iterator[Any]:
    options = ["--processes", "2", "--batch-max", "2000", *([] if archive else ["--no-archive"])]
    command = [sys.executable, "-m", "outrider", "relay", "--store", url, "--broker", "null://", *options]
    relays = Popen(command)
    try:
        yield
    finally:
        relays.terminate()
        relays.wait(timeout=30)
