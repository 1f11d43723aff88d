"""What the journal of the outbox costs, in processor time of client and database together.

The first kind has the statements of a store without a journal, so the second one shows the cost of one that is off.
"""

from __future__ import annotations

import asyncio
import os

import asyncpg

import outrider
from bench import backlog
from bench.load import Tally
from bench.processes import Watch
from bench.staging import BODY, Cost
from outrider import Event, Relay
from outrider.brokers.null import NullBroker
from outrider.stores.postgres import PostgresStore
from outrider.testing.servers import PostgresServer

KEYS = 5_000
NOT_INSTALLED, OFF, ON = "no journal installed", "journal off", "journal on"
KINDS = (NOT_INSTALLED, OFF, ON)
PER_TRANSACTION = 10
EMPTY = "TRUNCATE outrider.outbox_journal"


async def run(server: PostgresServer, events: int, rounds: int) -> dict[str, list[Cost]]:
    """Measure staging and relaying of every kind in turns. The least of the rounds counts: other load only adds."""
    await backlog.prepare(server.url, events)
    spent: dict[str, dict[str, list[float]]] = {"staging": {}, "relay": {}}
    for _ in range(rounds):
        for kind in KINDS:
            store = await PostgresStore.open(server.url)
            plain = PostgresStore(store.database, schema=store.schema, lanes=store.lanes, archive=True)
            await store.journal.turn(on=kind == ON)
            spent["staging"].setdefault(kind, []).append(await _stage(server, events // 4))
            drained = await _drain(server, plain if kind == NOT_INSTALLED else store, events)
            spent["relay"].setdefault(kind, []).append(drained)
            await store.journal.turn(on=False)
            await store.close()
    return {part: [Cost(kind, min(each)) for kind, each in kinds.items()] for part, kinds in spent.items()}


async def _stage(server: PostgresServer, events: int) -> float:
    """Stage events, ten to a transaction; return the processor time of an event, in microseconds."""
    conn = await asyncpg.connect(server.url)
    await conn.execute(f"{backlog.EMPTY}; {EMPTY}")
    with _watch(server) as watch:
        for number in range(events // PER_TRANSACTION):
            async with conn.transaction():
                made = [Event("order.placed", BODY, aggregate_id=f"k{number % 100}") for _ in range(PER_TRANSACTION)]
                await outrider.stage(conn, *made)
    await conn.close()
    return _microseconds(watch, events)


async def _drain(server: PostgresServer, store: PostgresStore, events: int) -> float:
    """Drain a backlog to nowhere; return the processor time of an event, in microseconds."""
    await backlog.fill(server.url, events, KEYS)
    tally = Tally(events)
    relay = Relay(store, NullBroker(), observer=tally)
    with _watch(server) as watch:
        running = asyncio.create_task(relay.run())
        await tally.reached.wait()
    relay.stop()
    await running
    return _microseconds(watch, events)


def _watch(server: PostgresServer) -> Watch:
    return Watch({"client": os.getpid(), "database": server.pid})


def _microseconds(watch: Watch, events: int) -> float:
    return sum(watch.cpu_seconds.values()) / events * 1e6
