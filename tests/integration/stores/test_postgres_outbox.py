"""The outbox on PostgreSQL beyond the contract: query plans, the plain INSERT, migrations, wake-ups."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

import outrider
from outrider import app
from outrider.errors import InvalidSetting, NotInTransaction, Unreachable, UsageError
from outrider.event import lane_of
from outrider.outbox.model import WAITING, Retention
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.stores.postgres import PostgresSchema, PostgresStore, wakeup
from outrider.stores.postgres.database import PostgresDatabase
from outrider.stores.postgres.outbox_admin import PostgresMaintenance
from outrider.stores.postgres.wakeup import NotificationListener
from outrider.testing import MemoryBroker
from outrider.testing.harness import order

pytestmark = pytest.mark.postgres

FILL = """
INSERT INTO outrider.outbox (event_type, aggregate_id, topic, payload, state)
SELECT 'order.placed', 'k' || i % 5000, 'orders', '{"pad": "xxxxxxxxxxxxxxxxxxxx"}', $2
FROM generate_series(1, $1::integer) AS i
"""
FILL_ARCHIVE = """
INSERT INTO outrider.outbox_archive (id, event_id, event_type, payload, headers, topic, key, priority, schema_version,
    attempts, created_at, sent_at)
SELECT i, gen_random_uuid(), 'order.placed', '{}', '{}', 'orders', 'k', 5, 1, 0, clock_timestamp(),
    clock_timestamp() - (i % 20) * interval '1 hour'
FROM generate_series(1, $1::integer) AS i
"""


async def _plan(conn: Any, sql: str, *args: Any) -> dict[str, Any]:
    async with conn.transaction():
        text = await conn.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *args)
    plan: dict[str, Any] = json.loads(text)[0]["Plan"]
    return plan


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in _nodes(child))]


async def _fetch_plan(store: PostgresStore, conn: Any) -> list[dict[str, Any]]:
    await store.heartbeat("relay", 600, first=True)
    lease = await store.claim("relay", range(store.lanes * 3))
    epochs = list(lease.epochs), list(lease.epochs.values())
    return _nodes(await _plan(conn, store.sql["fetch"], "relay", *epochs, [20] * len(lease.epochs)))


def _scans(nodes: list[dict[str, Any]], table: str) -> list[tuple[str, str | None]]:
    return [(node["Node Type"], node.get("Index Name")) for node in nodes if node.get("Relation Name") == table]


@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "statistics of an empty table"])
async def test_the_fetch_reads_the_partial_index_on_200_000_pending_rows(
    store: PostgresStore, conn: Any, analyzed: bool
) -> None:
    await conn.execute("ANALYZE outrider.outbox")
    await conn.execute(FILL, 200_000, "pending")
    if analyzed:
        await conn.execute("ANALYZE outrider.outbox")
    nodes = await _fetch_plan(store, conn)
    assert _scans(nodes, "outbox") == [("Index Scan", "outbox_fetchable")]
    [scan] = [node for node in nodes if node.get("Index Name") == "outbox_fetchable"]
    assert scan["Actual Rows"] * scan["Actual Loops"] <= 20 * 96


async def test_a_million_archived_rows_do_not_touch_the_fetch_nor_the_look_up_of_an_id(
    store: PostgresStore, conn: Any
) -> None:
    await conn.execute(FILL_ARCHIVE, 1_000_000)
    await conn.execute(FILL, 1_000, "pending")
    await conn.execute("ANALYZE outrider.outbox; ANALYZE outrider.outbox_archive")
    nodes = await _fetch_plan(store, conn)
    assert _scans(nodes, "outbox") == [("Index Scan", "outbox_fetchable")]
    assert not any(str(node.get("Relation Name", "")).startswith("outbox_archive") for node in nodes)
    retract = _nodes(await _plan(conn, store.sql["retract"], [uuid4() for _ in range(10)]))
    large = "SELECT relname FROM pg_class WHERE relname LIKE 'outbox_archive_2%' AND relkind = 'r' AND reltuples > 1000"
    filled = {row["relname"] for row in await conn.fetch(large)}
    archive = {node["Relation Name"]: node["Node Type"] for node in retract if node.get("Relation Name") in filled}
    assert archive.keys() == filled
    assert all(kind.startswith(("Index", "Bitmap")) for kind in archive.values())


@pytest.mark.parametrize("verb", ["confirm_archive", "confirm_delete"])
@pytest.mark.parametrize("rows", [1_000, 100_000])
async def test_a_settle_looks_its_events_up_once_and_not_once_per_lane(
    store: PostgresStore, conn: Any, verb: str, rows: int
) -> None:
    await conn.execute(FILL, rows, "pending")
    await conn.execute("ANALYZE outrider.outbox")
    await store.heartbeat("relay", 600, first=True)
    lease = await store.claim("relay", range(store.lanes * 3))
    fetched = await store.fetch(lease, dict.fromkeys(lease.epochs, 60))
    for batch in (50, 1_500):
        ids = [event.event_id for event in fetched.events[:batch]]
        epochs = list(lease.epochs), list(lease.epochs.values())
        topics: list[list[str]] = [[], []] if verb == "confirm_archive" else []
        nodes = _nodes(await _plan(conn, store.sql[verb], "relay", *epochs, ids, *topics))
        scans = [node for node in nodes if node.get("Relation Name") == "outbox" and "Scan" in node["Node Type"]]
        assert [scan["Actual Loops"] for scan in scans] == [1]


async def test_a_drain_reads_the_waiting_index_among_200_000_parked_rows(store: PostgresStore, conn: Any) -> None:
    await conn.execute(FILL, 200_000, "parked")
    lane = lane_of("k1", 5, store.lanes)
    block = "INSERT INTO outrider.outbox_blocked VALUES ($1, 'orders', 'k1', NULL, 'draining', clock_timestamp())"
    await conn.execute(block, lane)
    await conn.execute("ANALYZE outrider.outbox")
    await store.heartbeat("relay", 600, first=True)
    lease = await store.claim("relay", [lane])
    plan = await _plan(conn, store.sql["due"], "relay", [lane], list(lease.epochs.values()), 100)
    assert _scans(_nodes(plan), "outbox") == [("Index Scan", "outbox_waiting")]


async def test_a_plain_insert_with_only_the_required_columns_is_delivered(store: PostgresStore, conn: Any) -> None:
    await conn.execute("""INSERT INTO outrider.outbox (event_type, payload) VALUES ('order.placed', '{"n": 1}')""")
    await conn.execute(
        """INSERT INTO outrider.outbox (event_type, payload, headers) VALUES ('odd', 'null', '{"retries": 3}')"""
    )
    broker = MemoryBroker()
    relay = outrider.Relay(store, broker)
    await relay.heartbeat()
    for worker in range(relay.settings.workers):
        await relay.run_once(worker)
    by_topic = {message.topic: message for message in broker.log}
    assert by_topic.keys() == {"events.order.placed", "events.odd"}
    message = by_topic["events.order.placed"]
    assert message.key == message.message_id
    assert (message.headers["correlation_id"], "traceparent" in message.headers) == (message.message_id, False)
    assert by_topic["events.odd"].headers["retries"] == "3"


async def test_python_and_postgresql_put_every_key_into_the_same_lane(store: PostgresStore, conn: Any) -> None:
    keys = ["", "A-1", "naïve ☂", "x" * 500, *(f"key-{n}" for n in range(200))]
    for priority in (0, 5, 9):
        sql = "SELECT outrider.outbox_lane_of(key, $2::smallint) FROM unnest($1::text[]) AS w (key)"
        rows = await conn.fetch(sql, keys, priority)
        assert [row[0] for row in rows] == [lane_of(key, priority, store.lanes) for key in keys]


async def test_the_database_rejects_an_unknown_transition(store: PostgresStore, conn: Any) -> None:
    await conn.execute(FILL, 1, "parked")
    with pytest.raises(asyncpg.CheckViolationError, match="from parked to pending"):
        await conn.execute("UPDATE outrider.outbox SET state = 'pending'")
    with pytest.raises(asyncpg.CheckViolationError):
        await conn.execute("UPDATE outrider.outbox SET state = 'sent'")


@pytest.mark.parametrize("state", sorted(WAITING))
async def test_the_database_rejects_a_waiting_row_without_a_topic(store: PostgresStore, conn: Any, state: str) -> None:
    insert = "INSERT INTO outrider.outbox (event_type, payload, state, topic) VALUES ('order.placed', '{}', $1, $2)"
    with pytest.raises(asyncpg.CheckViolationError):
        await conn.execute(insert, state, None)
    await conn.execute(insert, state, "orders")
    # It is found, though nothing says that its stream is blocked.
    await store.maintenance.prune(Retention())
    broker = MemoryBroker()
    relay = Relay(store, broker, RelaySettings(workers=1))
    await relay.heartbeat()
    await relay.run_once()
    assert [message.topic for message in broker.log] == ["orders"]


async def test_staging_outside_a_transaction_is_rejected(store: PostgresStore, conn: Any) -> None:
    with pytest.raises(NotInTransaction, match=r"conn\.transaction"):
        await outrider.stage(conn, order(1))
    assert await conn.fetchval("SELECT count(*) FROM outrider.outbox") == 0


async def test_interrupted_migrations_continue_and_run_once(empty_database: str) -> None:
    url = empty_database
    schema = PostgresSchema(url, schema="shop", lanes=8)
    planned = await schema.plan()
    conn = await asyncpg.connect(url)
    # A table of ours that should not be there yet makes the migration break in the middle.
    await conn.execute("CREATE SCHEMA shop; CREATE TABLE shop.outbox_blocked (x integer)")
    with pytest.raises(outrider.OutriderError, match="outbox_blocked"):
        await schema.migrate()
    assert (await schema.status())[0].state == "partial"
    await conn.execute("DROP TABLE shop.outbox_blocked")
    continued = await schema.migrate()
    assert 0 < len(continued) < len(planned)
    assert await schema.migrate() == await schema.plan() == []
    assert (await schema.status())[0].state == "applied"
    store = await PostgresStore.open(url, schema="shop")
    assert store.lanes == 8
    await store.close()
    await conn.close()


@pytest.mark.parametrize(
    ("workers", "said", "size"), [(None, "", 8), (4, "", 8), (16, "", 18), (4, "?connections_max=5", 5)]
)
async def test_the_pool_has_room_for_the_workers_of_a_relay(
    postgres_url: str, caplog: pytest.LogCaptureFixture, workers: int | None, said: str, size: int
) -> None:
    store = await app.open_store(f"{postgres_url}{said}", concurrency=workers)
    assert isinstance(store, PostgresStore)
    assert store.database.pool.get_max_size() == size
    assert ("connections scarce" in [record.message for record in caplog.records]) is bool(said)
    await store.close()


async def test_two_migrators_at_once_do_the_work_once(empty_database: str) -> None:
    url = empty_database
    done = await asyncio.gather(*(PostgresSchema(url).migrate() for _ in range(3)))
    steps = [(step.version, step.name) for run in done for step in run]
    assert len(steps) == len(set(steps)) > 20


async def test_an_empty_database_a_silent_server_and_a_bad_schema_name_are_distinguished_with_the_remedy(
    empty_database: str,
) -> None:
    url = empty_database
    with pytest.raises(UsageError, match="outrider db migrate"):
        await PostgresStore.open(url)
    with pytest.raises(Unreachable, match="is it running"):
        await PostgresStore.open("postgresql://postgres@127.0.0.1:1/nothing")
    with pytest.raises(InvalidSetting, match="not allowed"):
        PostgresSchema(url, schema="drop table;")


async def test_a_notification_wakes_a_listener(store: PostgresStore, postgres_url: str) -> None:
    woken = asyncio.Event()
    other = await PostgresStore.open(postgres_url)
    # Without the looks at the id sequence, which wake as well.
    async with NotificationListener(store.database, "outrider_outbox").listening(woken.set), asyncio.timeout(20):
        # Notifications before the listener is connected are lost by design, so it wakes once at its start.
        await woken.wait()
        woken.clear()
        await other.notify()
        await woken.wait()
    await other.close()


class SilentProxy:
    """A way to a server. The connections that are open when it falls silent stay open, and carry nothing any more."""

    def __init__(self, url: str) -> None:
        self._target, self._silent = urlsplit(url), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Yield the URL of the server through the proxy."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        user = self._target.netloc.rpartition("@")[0]
        yield self._target._replace(netloc=f"{user}@127.0.0.1:{port}").geturl()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fall_silent(self) -> None:
        """Carry nothing any more on the present connections."""
        self._silent.set()
        self._silent = asyncio.Event()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.append(asyncio.create_task(self._carry(source, sink, self._silent)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, silent: asyncio.Event) -> None:
        try:
            while data := await source.read(65536):
                if silent.is_set():
                    await asyncio.Event().wait()
                sink.write(data)
        finally:
            sink.close()
            with suppress(OSError):
                await sink.wait_closed()


async def test_a_listener_whose_connection_dies_without_a_word_is_replaced_and_says_so_once(
    postgres_url: str, conn: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wakeup, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(wakeup, "CHECK_SECONDS_MAX", 0.5)
    monkeypatch.setattr(wakeup, "AWAY_SECONDS", 0.05)
    woken, proxy = asyncio.Event(), SilentProxy(postgres_url)
    async with proxy.open() as url, asyncio.timeout(30):
        listener = NotificationListener(PostgresDatabase(url), "outrider_outbox")
        async with listener.listening(woken.set):
            await woken.wait()
            woken.clear()
            proxy.fall_silent()
            # The next listener is connected.
            await woken.wait()
            woken.clear()
            await conn.execute("SELECT pg_notify('outrider_outbox', '')")
            await woken.wait()
    assert [record.message for record in caplog.records if "listens for notifications" in record.message] == [
        "the connection that listens for notifications is lost; polling covers the gap"
    ]


async def test_old_partitions_are_dropped_and_new_ones_made_ahead(store: PostgresStore, conn: Any) -> None:
    await conn.execute(
        "CREATE TABLE outrider.outbox_archive_20200101 PARTITION OF outrider.outbox_archive "
        "FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
    )
    maintenance = PostgresMaintenance(store.database, "outrider")
    await maintenance.prepare()
    await maintenance.prune(Retention())
    names = [row["relname"] for row in await conn.fetch(store.maintenance._sql["partitions"])]  # type: ignore[attr-defined]
    assert "outbox_archive_20200101" not in names
    assert len(names) == 8 + 1


async def test_a_partition_in_use_is_dropped_another_time(store: PostgresStore, conn: Any, postgres_url: str) -> None:
    await conn.execute(
        "CREATE TABLE outrider.outbox_archive_20200101 PARTITION OF outrider.outbox_archive "
        "FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
    )
    reader = await asyncpg.connect(postgres_url)
    async with reader.transaction():
        await reader.execute("SELECT * FROM outrider.outbox_archive_20200101")
        await store.maintenance.prune(Retention())
        assert await conn.fetchval("SELECT to_regclass('outrider.outbox_archive_20200101') IS NOT NULL")
    await store.maintenance.prune(Retention())
    assert await conn.fetchval("SELECT to_regclass('outrider.outbox_archive_20200101') IS NULL")
    await reader.close()
