"""A lone event on an idle system, from commit to confirm, on every store and by every kind of writer; the cost of rest.

The relay has default settings, except that it polls every ten seconds from the start, as it does by default after some
seconds without an event: polling takes no part. Writer and relay share a process, and so a clock. An event is alone:
the next one is inserted after its confirm and a random pause. Half of the rows commit at once, half 0.2 to 3 seconds
after the insert.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncpg
from bson.binary import Binary, UuidRepresentation
from pymongo import AsyncMongoClient, MongoClient
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bench.latency import RARELY, Timed
from bench.processes import Watch, relays
from outrider import Event, Outbox, Relay, Waker
from outrider.app import open_schema, open_store
from outrider.brokers.null import NullBroker
from outrider.testing.servers import MongoServer, PgBouncer, PostgresServer
from outrider.testing.servers.postgres import find_programs

CONFIRM_SECONDS_MAX = 30.0
WARM_EVENTS = 2
START_SECONDS = 5.0
GAP_SECONDS = 0.05, 0.3
LATE_SECONDS = 0.2, 3.0
BODY = {"order": 1}
OUTBOX = Outbox()

HOOK, DRIVER, PLAIN = "commit hook", "plain driver", "plain INSERT"
AT_ONCE, LATE = "at once", "0.2 to 3 s later"

Write = Callable[[UUID, float], Awaitable[None]]
"""Inserts an event, waits for so many seconds, commits, and returns as soon as the commit is known."""


class Lone(NamedTuple):
    """How long lone events took in one row: the median, and the slowest but one in a hundred."""

    store: str
    writer: str
    commit: str
    events: int
    p50_milliseconds: float
    p99_milliseconds: float


class Rest(NamedTuple):
    """The cost of an idle relay, beyond that of an idle server."""

    store: str
    database_core_percent: float
    relay_core_percent: float
    transactions_per_second: float | None
    """Transactions of PostgreSQL, of which a look is one; operations of MongoDB."""
    log_bytes_per_minute: float | None
    """Bytes of write-ahead log or journal: heartbeats, and maintenance once a minute."""


class Spent(NamedTuple):
    """The figures of a server since its start, or over some seconds: None where the store counts nothing."""

    transactions: float | None = None
    log_bytes: float | None = None
    database_seconds: float = 0.0
    relay_seconds: float = 0.0


@dataclass(slots=True)
class Place:
    """A store with its writers; `probe` reads the figures of the server."""

    name: str
    url: str
    server_pid: int | None
    writers: dict[str, Callable[[], Any]]
    probe: Callable[[], Awaitable[Spent]]


async def run(
    postgres: PostgresServer, mongo: MongoServer, folder: Path, *, events: int, rest_seconds: float
) -> tuple[list[Lone], list[Rest]]:
    """Measure the cost of rest first, then the events that commit at once, then all the late ones side by side."""
    with PgBouncer(postgres) as pooler:
        places = [
            _postgres(postgres, None, "idle"),
            _postgres(postgres, pooler, "idle_pooled"),
            _mongo(mongo),
            _sqlite(folder / "idle.db"),
        ]
        for place in places:
            await open_schema(place.url).migrate()
        direct, pooled, *others = places
        # Statistics of the tables just made would be written in the midst of it.
        await _execute(postgres.url, "ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
        rests = [*await asyncio.gather(*(_rest(place, rest_seconds) for place in (direct, *others)))]
        # On the same server as the first.
        rests.insert(1, await _rest(pooled, rest_seconds))
        await _execute(postgres.url, "ALTER SYSTEM RESET autovacuum", "SELECT pg_reload_conf()")
        rows = [await _measure(place, writer, AT_ONCE, events) for place in places for writer in place.writers]
        # Late events mostly wait, so different stores disturb each other little.
        late = await asyncio.gather(*(_measure_late(place, events) for place in places))
    return sorted([*rows, *(row for each in late for row in each)], key=lambda row: row[:2]), rests


async def _execute(url: str, *statements: str) -> None:
    conn = await asyncpg.connect(url)
    for statement in statements:
        await conn.execute(statement)
    await conn.close()


async def _measure_late(place: Place, events: int) -> list[Lone]:
    return [await _measure(place, writer, LATE, max(2, events // 3)) for writer in place.writers]


async def _measure(place: Place, writer: str, commit: str, events: int) -> Lone:
    confirmed_at: dict[str, float] = {}
    store, broker = await open_store(place.url), Timed(NullBroker(), confirmed_at)
    relay = Relay(store, broker, RARELY)
    running = asyncio.create_task(relay.run())
    waits = []
    async with place.writers[writer]() as write:
        for _ in range(WARM_EVENTS + events):
            await asyncio.sleep(random.uniform(*GAP_SECONDS))
            event_id = uuid4()
            await write(event_id, random.uniform(*LATE_SECONDS) if commit == LATE else 0.0)
            committed_at = time.monotonic()
            async with asyncio.timeout(CONFIRM_SECONDS_MAX):
                while str(event_id) not in confirmed_at:  # noqa: ASYNC110 (a wait that costs little)
                    await asyncio.sleep(0.002)
            waits.append((confirmed_at[str(event_id)] - committed_at) * 1e3)
    relay.stop()
    await running
    await store.close()
    cuts = quantiles(waits[WARM_EVENTS:], n=100, method="inclusive")
    return Lone(place.name, writer, commit, events, cuts[49], cuts[98])


async def _rest(place: Place, seconds: float) -> Rest:
    """Compare a server with an idle relay to the server alone."""
    alone = await _spent(place, seconds, None)
    async with relays(place.url, "null://") as relay:
        # The start is another matter: lanes are claimed, and polling backs off.
        await _started(place)
        await asyncio.sleep(START_SECONDS)
        beside = await _spent(place, seconds, relay.pid)
    return Rest(
        place.name,
        100 * max(0.0, beside.database_seconds - alone.database_seconds) / seconds,
        100 * beside.relay_seconds / seconds,
        _more(beside.transactions, alone.transactions, seconds),
        _more(beside.log_bytes, alone.log_bytes, seconds / 60),
    )


async def _started(place: Place) -> None:
    store = await open_store(place.url)
    async with asyncio.timeout(CONFIRM_SECONDS_MAX):
        while await store.admin.lane_owner(0) is None:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.1)
    await store.close()


def _more(beside: float | None, alone: float | None, per: float) -> float | None:
    return None if beside is None or alone is None else (beside - alone) / per


async def _spent(place: Place, seconds: float, relay_pid: int | None) -> Spent:
    pids = {"database": place.server_pid, "relay": relay_pid}
    before = await place.probe()
    with Watch({name: pid for name, pid in pids.items() if pid is not None}) as watch:
        await asyncio.sleep(seconds)
    after = await place.probe()
    database, relay = (watch.cpu_seconds.get(name, 0.0) for name in pids)
    transactions = _more(after.transactions, before.transactions, 1)
    return Spent(transactions, _more(after.log_bytes, before.log_bytes, 1), database, relay)


def _event(event_id: UUID) -> Event:
    return Event("order.placed", BODY, event_id=event_id, aggregate_id=str(event_id))


def _postgres(server: PostgresServer, pooler: PgBouncer | None, name: str) -> Place:
    direct = server.database(name)
    url = direct
    if pooler:
        url = urlsplit(pooler.url)._replace(path=f"/{name}", query="pooled=true").geturl()

    @asynccontextmanager
    async def hook() -> AsyncIterator[Write]:
        engine, waker = create_async_engine(direct.replace("postgresql://", "postgresql+asyncpg://")), Waker(direct)

        async def write(event_id: UUID, seconds: float) -> None:
            async with AsyncSession(engine) as session, session.begin():
                await Outbox(wake=waker).stage(session, _event(event_id))
                await asyncio.sleep(seconds)

        yield write
        await engine.dispose()
        await asyncio.to_thread(waker.close)

    @asynccontextmanager
    async def driver() -> AsyncIterator[Write]:
        conn = await asyncpg.connect(url.partition("?")[0], statement_cache_size=0 if pooler else 100)

        async def write(event_id: UUID, seconds: float) -> None:
            async with conn.transaction():
                await OUTBOX.stage(conn, _event(event_id))
                await asyncio.sleep(seconds)

        yield write
        await conn.close()

    @asynccontextmanager
    async def plain() -> AsyncIterator[Write]:
        command = [str(find_programs() / "psql"), "-qXAt", url.partition("?")[0]]
        pipe = asyncio.subprocess.PIPE
        psql = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert psql.stdin is not None
        to_psql, from_psql = psql.stdin, psql.stdout
        assert from_psql is not None

        async def write(event_id: UUID, seconds: float) -> None:
            to_psql.write(
                "BEGIN; INSERT INTO outrider.outbox (event_id, event_type, payload) "
                f"VALUES ('{event_id}', 'order.placed', '{json.dumps(BODY)}');\n\\! sleep {seconds:.3f}\n"
                "COMMIT;\n\\echo done\n".encode()
            )
            await from_psql.readuntil(b"done\n")

        yield write
        to_psql.close()
        await psql.wait()

    async def probe() -> Spent:
        conn = await asyncpg.connect(direct)
        try:
            # Statistics of sessions arrive late; transactions stand for statements, since each look is one.
            sql = (
                "SELECT xact_commit, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0') FROM pg_stat_database "
                "WHERE datname = current_database()"
            )
            [row] = await conn.fetch(sql)
            return Spent(float(row[0]), float(row[1]))
        finally:
            await conn.close()

    label = "PostgreSQL, through PgBouncer" if pooler else "PostgreSQL"
    writers: dict[str, Callable[[], Any]] = (
        {DRIVER: driver, PLAIN: plain}
        if pooler
        else {
            HOOK: hook,
            DRIVER: driver,
            PLAIN: plain,
        }
    )
    return Place(label, url, server.pid, writers, probe)


def _mongo(server: MongoServer) -> Place:
    @asynccontextmanager
    async def driver() -> AsyncIterator[Write]:
        async with AsyncMongoClient[dict[str, Any]](server.url) as client:

            async def write(event_id: UUID, seconds: float) -> None:
                async with client.start_session() as session, await session.start_transaction():
                    await OUTBOX.stage(session, _event(event_id))
                    await asyncio.sleep(seconds)

            yield write

    @asynccontextmanager
    async def plain() -> AsyncIterator[Write]:
        """Insert with no knowledge of Outrider, from a thread, as another program would."""
        client = MongoClient[dict[str, Any]](server.url)

        def insert(event_id: UUID, seconds: float) -> None:
            document = {
                "_id": Binary.from_uuid(event_id, UuidRepresentation.STANDARD),
                "event_type": "order.placed",
                "payload": json.dumps(BODY),
            }
            with client.start_session() as session, session.start_transaction():
                client["outrider"]["outbox"].insert_one(document, session=session)
                time.sleep(seconds)

        yield lambda event_id, seconds: asyncio.to_thread(insert, event_id, seconds)
        client.close()

    async def probe() -> Spent:
        async with AsyncMongoClient[dict[str, Any]](server.url) as client:
            status = await client.admin.command("serverStatus")
        written = status["wiredTiger"]["log"]["log bytes of payload data"]
        return Spent(float(sum(status["opcounters"].values())), float(written))

    return Place("MongoDB", server.url, server.pid, {DRIVER: driver, PLAIN: plain}, probe)


def _sqlite(path: Path) -> Place:
    def writer(insert: Callable[[sqlite3.Connection, UUID], object]) -> Callable[[], Any]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Write]:
            conn = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)

            def write(event_id: UUID, seconds: float) -> None:
                conn.execute("BEGIN IMMEDIATE")
                insert(conn, event_id)
                time.sleep(seconds)
                conn.execute("COMMIT")

            yield lambda event_id, seconds: asyncio.to_thread(write, event_id, seconds)
            conn.close()

        return opened

    def plain(conn: sqlite3.Connection, event_id: UUID) -> None:
        sql = "INSERT INTO outbox (event_id, event_type, payload) VALUES (?, 'order.placed', ?)"
        conn.execute(sql, (str(event_id), json.dumps(BODY)))

    writers = {DRIVER: writer(lambda conn, event_id: OUTBOX.stage_sync(conn, _event(event_id))), PLAIN: writer(plain)}

    async def probe() -> Spent:
        return Spent()

    return Place("SQLite", f"sqlite:///{path}", None, writers, probe)
