"""Rules of the outbox on SQLite alone; the rules of all stores are in the contract suite."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from outrider.brokers.base import CONFIRMED
from outrider.drivers.sqlite import stage
from outrider.errors import NotInTransaction, Transient, UsageError
from outrider.event import OutboxRow, Stream, lane_of, uuid7
from outrider.outbox.model import (
    PARK,
    WAITING,
    Lease,
    NewEvent,
    OptimisticClaim,
    Outcome,
    Retry,
    Settlement,
    Settlements,
    StageRequest,
)
from outrider.stores.sqlite import SqliteSchema, SqliteStore, database
from tests.support.running_relay import relaying_without_polls

ALL_LANES = range(12)
QUOTAS = dict.fromkeys(ALL_LANES, 100)


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    await SqliteSchema(path, lanes=4).migrate()
    return path


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    await store.close()


@pytest.fixture
def conn(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as conn:
        yield conn


@pytest.fixture
async def lease(store: SqliteStore) -> Lease:
    await store.heartbeat("relay", 60, first=True)
    return await store.claim("relay", ALL_LANES)


def draft(key: str | None = "A-1", **changes: Any) -> NewEvent:
    made = NewEvent(
        uuid7(), "t", None, None, "{}", "{}", "orders", key, None, 5, "1", None, None, None, None, None, None
    )
    return made._replace(**changes)


def plain(*drafts: NewEvent) -> StageRequest:
    return StageRequest(list(drafts), [], True)


def insert(conn: sqlite3.Connection, payload: str = "{}", **columns: Any) -> None:
    """Insert as another program would."""
    names = ["event_type", "payload", *columns]
    values = ["order.placed", payload, *columns.values()]
    with conn:
        conn.execute(f"INSERT INTO outbox ({', '.join(names)}) VALUES ({', '.join('?' * len(values))})", values)


def settled(event: OutboxRow, outcome: Outcome, topic: str = "orders") -> Settlement:
    return Settlement(event, Stream(event.lane, topic, event.key), outcome)


async def test_a_plain_insert_with_only_the_required_columns_is_fetched(
    store: SqliteStore, lease: Lease, conn: sqlite3.Connection
) -> None:
    insert(conn, '{"total": 12}')
    (event,) = (await store.fetch(lease, QUOTAS)).events
    assert event.lane == lane_of(str(event.event_id), 5, store.lanes)
    assert event.event_id.version == 4
    assert (event.payload, event.headers, event.topic) == (b'{"total": 12}', b"{}", "events.order.placed")
    assert abs((event.created_at - store.clock.now()).total_seconds()) < 60


async def test_a_plain_insert_keeps_its_position_before_events_staged_later(
    store: SqliteStore, lease: Lease, conn: sqlite3.Connection
) -> None:
    insert(conn, key="A-1", topic="orders")
    with conn:
        conn.execute("BEGIN")
        stage(conn, plain(draft()), None)
    events = (await store.fetch(lease, QUOTAS)).events
    assert [event.event_type for event in events] == ["order.placed", "t"]


async def test_lanes_are_filled_in_bounded_steps_before_anything_is_fetched(
    store: SqliteStore, lease: Lease, conn: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.stores.sqlite.outbox.FILL_MAX", 2)
    for _ in range(5):
        insert(conn)
    assert len((await store.fetch(lease, QUOTAS)).events) == 5


async def test_the_topic_a_relay_resolved_is_found_again_through_the_stream(
    store: SqliteStore, lease: Lease, conn: sqlite3.Connection
) -> None:
    insert(conn, key="A-1")
    insert(conn, key="A-1")
    head, follower = (await store.fetch(lease, QUOTAS)).events
    assert (
        await store.settle(
            lease, Settlements.of([settled(head, Retry(0, {"kind": "nacked"})), settled(follower, PARK)])
        )
        == 2
    )
    (due,) = (await store.due(lease, 10)).streams
    assert [(event.position, event.topic) for event in due.events] == [(head.position, "orders")]
    assert await store.settle(lease, Settlements.of([settled(due.events[0], CONFIRMED)])) == 1
    (due,) = (await store.due(lease, 10)).streams
    assert [event.position for event in due.events] == [follower.position]


async def test_the_archive_names_the_topic_a_relay_resolved(
    store: SqliteStore, lease: Lease, conn: sqlite3.Connection
) -> None:
    store.topic_rule = lambda *_: "orders"
    insert(conn)
    (event,) = (await store.fetch(lease, QUOTAS)).events
    await store.settle(lease, Settlements.of([settled(event, CONFIRMED)]))
    assert (await store.admin.event(event.event_id))["topic"] == "orders"


async def test_a_foreign_event_can_be_dead_lettered_before_a_relay_has_met_it(
    store: SqliteStore, conn: sqlite3.Connection
) -> None:
    event_id = uuid4()
    insert(conn, event_id=str(event_id))
    assert await store.admin.dead_letter(event_id, "me", {"kind": "by_hand"}, "block")
    (held,) = await store.admin.blocked_streams(10)
    assert held.stream == Stream(lane_of(str(event_id), 5, 4), "events.order.placed", str(event_id))


def test_the_database_rejects_a_change_of_state_that_is_no_transition(conn: sqlite3.Connection) -> None:
    insert(conn, state="parked", topic="orders")
    with pytest.raises(sqlite3.IntegrityError, match="may not change its state"):
        conn.execute("UPDATE outbox SET state = 'pending'")


@pytest.mark.parametrize(
    "columns",
    [
        {"state": "sent"},
        {"event_id": "nonsense"},
        {"event_id": str(uuid4()).upper()},
        {"payload": "{"},
        {"headers": "[]"},
        {"priority": 10},
        {"available_at": "tomorrow"},
        {"attempts": 40_000},
        {"attempts": "many"},
        *({"state": state, "topic": topic} for state in sorted(WAITING) for topic in (None, "")),
    ],
)
def test_the_database_rejects_rows_that_a_relay_could_not_read(
    conn: sqlite3.Connection, columns: dict[str, Any]
) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        insert(conn, **columns)


async def test_a_relay_cannot_settle_an_event_that_a_writer_still_claims(
    store: SqliteStore, lease: Lease, conn: sqlite3.Connection
) -> None:
    with conn:
        conn.execute("BEGIN")
        (inserted,) = stage(conn, plain(draft()), OptimisticClaim("writer", 60))
    assert inserted.optimistic
    (event,) = (await store.fetch(lease, QUOTAS)).events
    assert event.readiness == "optimistic"
    assert await store.settle(lease, Settlements.of([settled(event, CONFIRMED)])) == 0


async def test_a_failure_behind_a_confirmed_event_keeps_its_delay(
    store: SqliteStore, lease: Lease, conn: sqlite3.Connection
) -> None:
    with conn:
        conn.execute("BEGIN")
        stage(conn, plain(draft(), draft()), None)
    events = (await store.fetch(lease, QUOTAS)).events
    await store.settle(lease, Settlements.of([settled(events[0], Retry(0, {})), settled(events[1], PARK)]))
    waiting = [events[0]._replace(state="failed"), events[1]._replace(state="parked")]
    await store.settle(lease, Settlements.of([settled(waiting[0], CONFIRMED), settled(waiting[1], Retry(60, {}))]))
    due = await store.due(lease, 10)
    assert due.streams == []
    assert due.next_seconds == pytest.approx(60, abs=5)


def test_staging_without_a_transaction_is_rejected(conn: sqlite3.Connection) -> None:
    with pytest.raises(NotInTransaction, match="BEGIN"):
        stage(conn, plain(draft()), None)


def test_staging_leaves_the_callers_connection_as_it_was(conn: sqlite3.Connection) -> None:
    conn.row_factory, conn.text_factory = sqlite3.Row, bytes
    conn.execute("CREATE TABLE orders (id)")
    conn.execute("INSERT INTO orders VALUES (1)")
    numbered = StageRequest([], [draft(), draft()], True)
    first = stage(conn, numbered, OptimisticClaim("writer", 5))
    assert stage(conn, numbered, None) == []
    assert (conn.row_factory, conn.text_factory, conn.isolation_level) == (sqlite3.Row, bytes, "")
    conn.commit()
    rows = conn.execute("SELECT event_id, sequence FROM outbox ORDER BY id").fetchall()
    assert [tuple(row) for row in rows] == [(str(inserted.event_id).encode(), n) for n, inserted in enumerate(first, 1)]


def test_rolling_back_leaves_neither_events_nor_numbers(conn: sqlite3.Connection) -> None:
    conn.execute("BEGIN")
    stage(conn, StageRequest([], [draft()], False), None)
    conn.rollback()
    assert conn.execute("SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM outbox_counter)").fetchone() == (
        0,
    )


def test_staging_after_a_stale_read_says_how_to_begin(path: Path, conn: sqlite3.Connection) -> None:
    conn.execute("BEGIN")
    conn.execute("SELECT count(*) FROM outbox").fetchone()
    with closing(sqlite3.connect(path)) as other:
        insert(other)
    with pytest.raises(Transient, match="BEGIN IMMEDIATE"):
        stage(conn, plain(draft()), None)


async def test_a_busy_database_is_a_transient_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database.open_existing, "__kwdefaults__", {"busy_seconds": 0.01})
    store = SqliteStore(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Transient):
            await store.heartbeat("relay", 60, first=True)
        other.execute("ROLLBACK")
    assert await store.heartbeat("relay", 60, first=True) is not None
    await store.close()


def test_a_database_without_an_outbox_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="outrider db migrate"):
        SqliteStore(tmp_path / "absent.db")
    assert not (tmp_path / "absent.db").exists()
    with closing(sqlite3.connect(tmp_path / "other.db")) as conn:
        conn.execute("CREATE TABLE orders (id)")
    with pytest.raises(UsageError, match="outrider db migrate"):
        SqliteStore(tmp_path / "other.db")


async def test_migrating_twice_does_nothing_the_second_time(tmp_path: Path) -> None:
    schema = SqliteSchema(tmp_path / "shop.db")
    planned = await schema.plan()
    assert not (tmp_path / "shop.db").exists()
    assert await schema.migrate() == planned
    assert await schema.migrate() == await schema.plan() == []
    assert {progress.state for progress in await schema.status()} == {"applied"}


async def test_an_interrupted_migration_continues(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE TABLE outbox_counter (in_the_way)")
    schema = SqliteSchema(path, lanes=4)
    with pytest.raises(sqlite3.OperationalError, match="outbox_counter already exists"):
        await schema.migrate()
    assert (await schema.status())[0].state == "partial"
    with pytest.raises(UsageError, match="outrider db migrate"):
        SqliteStore(path)
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("DROP TABLE outbox_counter")
    left = await schema.plan()
    assert left[0].name == "outbox_counter"
    assert await schema.migrate() == left
    store = SqliteStore(path)
    assert store.lanes == 4
    await store.close()


async def test_a_migration_whose_text_has_changed_is_rejected(path: Path, conn: sqlite3.Connection) -> None:
    with conn:
        conn.execute("UPDATE outrider_migration SET checksum = 'other' WHERE step = 'outbox'")
    with pytest.raises(UsageError, match="another text"):
        await SqliteSchema(path).plan()


async def test_several_migrators_at_once_share_the_steps(tmp_path: Path) -> None:
    schemas = [SqliteSchema(tmp_path / "shop.db") for _ in range(4)]
    planned = await schemas[0].plan()
    done = await asyncio.gather(*(schema.migrate() for schema in schemas))
    assert sorted(step.name for steps in done for step in steps) == sorted(step.name for step in planned)


async def test_a_commit_on_any_connection_wakes_the_relay(store: SqliteStore, path: Path) -> None:
    woken = asyncio.Event()
    async with store.listen(woken.set):
        with closing(sqlite3.connect(path)) as conn:
            insert(conn)
        await asyncio.wait_for(woken.wait(), 10)
        woken.clear()
        await store.notify()
        assert woken.is_set()


async def test_lone_events_are_found_without_a_poll(store: SqliteStore, path: Path) -> None:
    found: list[UUID] = []
    async with relaying_without_polls(store) as confirmed:
        with closing(sqlite3.connect(path, timeout=30, check_same_thread=False)) as conn:
            for _ in range(3):
                found.append(uuid7())
                sql = "INSERT INTO outbox (event_id, event_type, payload) VALUES (?, 'order.placed', '{}')"
                await asyncio.to_thread(committed, conn, sql, str(found[-1]))
                await confirmed(*found)


def committed(conn: sqlite3.Connection, sql: str, event_id: str) -> None:
    """Insert and commit, after a wait for other writers; beside the event loop, because the relay writes as well."""
    with conn:
        conn.execute(sql, (event_id,))


async def test_closing_ends_the_stores_thread(path: Path) -> None:
    # Key rings of other tests keep stores open for the life of the process.
    others = set(threading.enumerate())
    store = SqliteStore(path)
    await store.admin.counts()
    await store.close()
    await store.close()
    names = [thread.name for thread in threading.enumerate() if thread not in others]
    assert not any(name.startswith("outrider-sqlite") for name in names)
