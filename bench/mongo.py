"""MongoDB: how fast a backlog drains, one document at a time and by our relay, and what staging adds."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, cast
from uuid import uuid4

from pymongo import AsyncMongoClient, ReturnDocument
from pymongo.write_concern import WriteConcern

import outrider
from bench.load import KEYS, Tally
from bench.processes import Watch, relays
from bench.staging import BODY, Cost
from outrider import Event, Relay
from outrider.brokers.null import NullBroker
from outrider.stores.mongo import MongoSchema, MongoStore
from outrider.testing.servers import MongoServer

STAGED_AT_ONCE = 1_000
ROUND = 25
RELAY = "relay"
ROOM = "cache_size=1G"
"""As much as a small server has; the throw-away ones of the tests make do with less."""
WRITES = WriteConcern("majority", j=True)

Client = AsyncMongoClient[dict[str, Any]]


class Rate(NamedTuple):
    """How fast one design drained, and what an event cost."""

    design: str
    events: int
    events_per_second: float
    cpu_microseconds_client: float
    cpu_microseconds_database: float


async def drains(server: MongoServer, events: int, seconds_max: float) -> list[Rate]:
    """Measure every design on the same backlog; the first one is what the others are compared with."""
    await MongoSchema(server.url).migrate()
    async with _client(server) as client:
        await client.admin.command({"setParameter": 1, "wiredTigerEngineRuntimeConfig": ROOM})
    rates = [await _one_by_one(server, events, seconds_max)]
    for archive in (True, False):
        rates.append(await _ours(server, events, archive=archive))
        rates.append(await _processes(server, 2 * events, archive=archive))
    return rates


async def _one_by_one(server: MongoServer, events: int, seconds_max: float) -> Rate:
    """Claim the oldest document, publish it, and mark it as sent, as in most articles; it keeps no order at a crash."""
    async with _client(server) as client:
        box = client["bench"].get_collection("textbook", write_concern=WRITES)
        await box.drop()
        await box.create_index(["status", "created_at"])
        await box.insert_many([_document(number) for number in range(events)])
        deadline, broker = time.monotonic() + seconds_max, cast("Any", NullBroker())

        async def drain() -> int:
            settled = 0
            while time.monotonic() < deadline and (found := await _claim(box)):
                await broker.publish([found])
                sent = {"$set": {"status": "sent", "sent_at": datetime.now(UTC)}}
                await box.update_one({"_id": found["_id"], "claimed_by": "bench"}, sent)
                settled += 1
            return settled

        return await _measured(server, "one document at a time", drain)


async def _claim(box: Any) -> dict[str, Any] | None:
    until = datetime.now(UTC) + timedelta(seconds=30)
    claim = {"$set": {"status": "claimed", "claimed_by": "bench", "claimed_until": until}, "$inc": {"attempts": 1}}
    found: dict[str, Any] | None = await box.find_one_and_update(
        {"status": "pending"}, claim, sort=[("created_at", 1)], return_document=ReturnDocument.AFTER
    )
    return found


def _document(number: int) -> dict[str, Any]:
    fields = {"event_type": "order.placed", "aggregate_id": f"k{number % KEYS}", "topic": "orders", "payload": BODY}
    return {"_id": uuid4(), **fields, "status": "pending", "attempts": 0, "created_at": datetime.now(UTC)}


async def _ours(server: MongoServer, events: int, *, archive: bool) -> Rate:
    await fill(server, events)
    store = await MongoStore.open(server.url, archive=archive)
    tally = Tally(events)
    relay = Relay(store, NullBroker(), observer=tally)

    async def drain() -> int:
        running = asyncio.create_task(relay.run())
        await tally.reached.wait()
        relay.stop()
        await running
        return events

    try:
        return await _measured(server, f"{RELAY}, 1 process{_option(archive)}", drain)
    finally:
        await store.close()


async def _processes(server: MongoServer, events: int, *, archive: bool) -> Rate:
    """The same with two relay processes, as `outrider relay --processes 2` runs them."""
    await fill(server, events)
    async with relays(server.url, "null://", processes=2, archive=archive) as running:
        # Starting Python is not what is measured: begin at the first movement.
        left = events - await running.settled()
        design = f"{RELAY}, 2 processes{_option(archive)}"
        return await _measured(server, design, lambda: running.settled(left), client=running.pid)


def _option(archive: bool) -> str:
    return "" if archive else ", --no-archive"


async def _measured(
    server: MongoServer, design: str, drain: Callable[[], Awaitable[int]], *, client: int | None = None
) -> Rate:
    with Watch({"client": client or os.getpid(), "database": server.pid}) as watch:
        settled = await drain()
    cost = {side: spent / max(1, settled) * 1e6 for side, spent in watch.cpu_seconds.items()}
    return Rate(design, settled, settled / watch.seconds, cost["client"], cost["database"])


async def fill(server: MongoServer, events: int) -> None:
    """Begin anew: nothing in the archive, and so many staged events in the outbox."""
    async with _client(server) as client, client.start_session() as session:
        for name in ("outbox", "outbox_archive"):
            await client["outrider"][name].delete_many({})
        for start in range(0, events, STAGED_AT_ONCE):
            some = [_order(number) for number in range(start, min(start + STAGED_AT_ONCE, events))]
            await session.with_transaction(partial(_stage, some))


async def _stage(events: list[Event], session: Any) -> None:
    await outrider.stage(session, *events)


def _order(number: int, **fields: Any) -> Event:
    return Event("order.placed", BODY, aggregate_id=f"k{number % KEYS}", topic="orders", **fields)


async def staging(server: MongoServer, transactions: int) -> list[Cost]:
    """Measure a transaction with and without staging, in turns, so that both see the same machine."""
    await MongoSchema(server.url).migrate()
    kinds: dict[str, Callable[[int], list[Event]]] = {
        "business write alone": lambda number: [],
        "and one staged event": lambda number: [_order(number)],
        "and one numbered event": lambda number: [_order(number, sequence="auto")],
        "and ten staged events": lambda number: [_order(number + key) for key in range(10)],
    }
    spent = dict.fromkeys(kinds, 0.0)
    rounds = max(1, transactions // ROUND)
    async with _client(server) as client:
        await client["bench"].drop_collection("orders")
        await client["bench"].create_collection("orders")
        for number in range(rounds):
            for name, events in kinds.items():
                started = time.perf_counter()
                for turn in range(ROUND):
                    await _transact(client, events(number * ROUND + turn))
                spent[name] += time.perf_counter() - started
        await client["outrider"]["outbox"].delete_many({})
    return [Cost(name, seconds / (rounds * ROUND) * 1e6) for name, seconds in spent.items()]


async def _transact(client: Client, events: list[Event]) -> None:
    async def run_once(session: Any) -> None:
        await client["bench"]["orders"].insert_one({"body": "x" * 200}, session=session)
        if events:
            await outrider.stage(session, *events)

    async with client.start_session() as session:
        await session.with_transaction(run_once, write_concern=WRITES)


def _client(server: MongoServer) -> Client:
    return AsyncMongoClient(server.url, uuidRepresentation="standard")
