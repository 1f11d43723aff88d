"""An idle relay on PostgreSQL: events are found without a poll, however late they commit, and rest costs nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
from typer.testing import CliRunner

import outrider
from outrider import Event, Relay, RelaySettings
from outrider.brokers.base import CONFIRMED, Rejected
from outrider.cli import app
from outrider.outbox.model import Fetched, Lease
from outrider.stores.postgres import PostgresStore, wakeup
from outrider.testing import MemoryBroker

pytestmark = pytest.mark.postgres

WAIT_SECONDS = 30.0
NEVER = RelaySettings(poll_seconds_min=600, poll_seconds_max=600, workers=1)
"""Polls so rarely that a test is over before."""
INSERT = "INSERT INTO outrider.outbox (event_id, event_type, payload) VALUES ($1, 'order.placed', '{}')"


class Looks(wakeup.InsertWatch):
    """Counts looks."""

    count = 0

    def observe(self, look: wakeup.Look) -> bool:
        Looks.count += 1
        return super().observe(look)


class Idle:
    """A relay without polls, and the numbers of its looks and fetches."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.fetches = 0

    @property
    def confirmed(self) -> list[str]:
        """The ids of confirmed events."""
        return [message.message_id for message in self.broker.log]

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something has happened."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not true():  # noqa: ASYNC110 (several places change the state)
                await asyncio.sleep(0.005)

    async def looks(self, count: int) -> None:
        """Wait for so many looks."""
        goal = Looks.count + count
        await self.until(lambda: Looks.count >= goal)

    async def quiet(self, looks: int = 15) -> None:
        """Wait until so many looks in a row have led to no fetch."""
        async with asyncio.timeout(WAIT_SECONDS):
            before = -1
            while before != self.fetches:
                before = self.fetches
                await self.looks(looks)


@asynccontextmanager
async def relaying(url: str, *, pooled: bool = False, settings: RelaySettings = NEVER) -> AsyncIterator[Idle]:
    """Run a relay that has nothing to do around the block."""
    idle, store = Idle(), await PostgresStore.open(url, pooled=pooled)
    fetch = store.fetch

    async def counted(lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        idle.fetches += 1
        return await fetch(lease, quotas)

    store.fetch = counted  # type: ignore[method-assign]
    relay = Relay(store, idle.broker, settings)
    running = asyncio.create_task(relay.run())
    try:
        yield idle
    finally:
        relay.stop()
        await running
        await store.close()


@pytest.fixture(autouse=True)
def counted_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "InsertWatch", Looks)


@pytest.fixture(params=["direct", pytest.param("pooled", marks=pytest.mark.pgbouncer)])
async def idle(request: pytest.FixtureRequest, postgres_url: str) -> AsyncIterator[Idle]:
    """An idle relay, connected directly or through PgBouncer in transaction mode."""
    pooled = request.param == "pooled"
    url = postgres_url
    if pooled:
        url = urlsplit(request.getfixturevalue("pgbouncer_url"))._replace(path=urlsplit(postgres_url).path).geturl()
    async with relaying(url, pooled=pooled) as idle:
        await idle.quiet()
        yield idle


async def test_a_lone_event_committed_at_once_is_found_without_a_poll(idle: Idle, conn: Any) -> None:
    event_id = uuid4()
    await conn.execute(INSERT, event_id)
    await idle.until(lambda: idle.confirmed == [str(event_id)])


@pytest.mark.parametrize("savepoints", [0, 3])
async def test_a_lone_event_committed_late_is_found_without_a_poll(idle: Idle, conn: Any, savepoints: int) -> None:
    async with conn.transaction():
        for _ in range(savepoints):
            await conn.execute("SAVEPOINT one")
        async with conn.transaction():
            [event_id] = await outrider.stage(conn, Event("order.placed", {}))
        # The relay has seen the sequence move, and has fetched in vain.
        await idle.looks(5)
        await idle.quiet()
        assert idle.confirmed == []
    await idle.until(lambda: idle.confirmed == [str(event_id)])


async def test_two_late_events_are_found_in_the_order_of_their_commits(
    idle: Idle, conn: Any, postgres_url: str
) -> None:
    other = await asyncpg.connect(postgres_url)
    first, second = conn.transaction(), other.transaction()
    ids = [uuid4(), uuid4()]
    await first.start()
    await conn.execute(INSERT, ids[0])
    await second.start()
    await other.execute(INSERT, ids[1])
    await idle.looks(5)
    await second.commit()
    await idle.until(lambda: idle.confirmed == [str(ids[1])])
    await idle.quiet()
    await first.commit()
    await idle.until(lambda: idle.confirmed == [str(ids[1]), str(ids[0])])
    await other.close()


async def test_an_event_that_is_rolled_back_leads_to_a_few_fetches_and_then_to_rest(idle: Idle, conn: Any) -> None:
    before = idle.fetches
    transaction = conn.transaction()
    await transaction.start()
    await conn.execute(INSERT, uuid4())
    await idle.looks(5)
    await idle.quiet()
    inserted = idle.fetches
    assert inserted > before
    await transaction.rollback()
    await idle.until(lambda: idle.fetches > inserted)
    await idle.quiet()
    assert idle.confirmed == []


async def test_writes_to_other_tables_wake_no_idle_relay(idle: Idle, conn: Any) -> None:
    await conn.execute("CREATE TABLE other (n integer)")
    before = idle.fetches
    for number in range(40):
        await conn.execute("INSERT INTO other VALUES ($1)", number)
        await idle.looks(1)
    # Not zero: transactions of other tests on this server may have been open when the relay started.
    assert idle.fetches - before <= 20
    await conn.execute("DROP TABLE other")


async def test_a_dead_letter_that_is_replayed_by_command_is_found_without_a_poll(conn: Any, postgres_url: str) -> None:
    async with relaying(postgres_url) as idle:
        idle.broker.script = lambda message: Rejected("not now")
        async with conn.transaction():
            [event_id] = await outrider.stage(conn, Event("order.placed", {}, key="A-7"))
        await _until_dead_lettered(conn)
        await idle.quiet()
        idle.broker.script = lambda message: CONFIRMED
        # A resumed event keeps its number, so the sequence does not move.
        command = ["dead-letters", "replay", str(event_id)]
        result = await asyncio.to_thread(CliRunner().invoke, app, command, env={"OUTRIDER_STORE": postgres_url})
        assert result.exit_code == 0, result.output
        await idle.until(lambda: idle.confirmed == [str(event_id)])


async def _until_dead_lettered(conn: Any) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not await conn.fetchval("SELECT count(*) FROM outrider.outbox_dead_letter"):  # noqa: ASYNC110 (a server)
            await asyncio.sleep(0.01)


async def test_a_look_writes_nothing_and_needs_no_transaction_id(store: PostgresStore, conn: Any) -> None:
    await conn.execute(INSERT, uuid4())
    async with conn.transaction():
        [[plan]] = await conn.fetch(f"EXPLAIN (ANALYZE, WAL, FORMAT JSON) {store.sql['sequence_look']}")
        [found] = json.loads(plan)
        assert found["Plan"]["WAL Records"] == 0
        assert found["Plan"]["Relation Name"] == "outbox_id_seq"
        assert await conn.fetchval("SELECT pg_current_xact_id_if_assigned()") is None


@pytest.fixture
async def restricted(conn: Any, postgres_url: str) -> AsyncIterator[str]:
    """The URL for a role that may do all that a relay needs, but not read the sequence."""
    role = f"relay_{uuid4().hex[:12]}"
    await conn.execute(
        f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA outrider TO {role}; "
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA outrider TO {role}"
    )
    # The driver passes the name on as a setting of the session.
    yield f"{postgres_url}{'&' if '?' in postgres_url else '?'}role={role}"
    await conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_without_the_right_to_the_sequence_a_relay_polls_and_says_so_once(
    restricted: str, conn: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wakeup, "FORBIDDEN_SECONDS", 0.01)
    polling = RelaySettings(poll_seconds_min=0.02, poll_seconds_max=0.05, workers=1)
    looks = 0

    class Counting(wakeup.SequenceWatcher):
        async def _look(self) -> wakeup.Look:
            nonlocal looks
            looks += 1
            return await super()._look()

    monkeypatch.setattr("outrider.stores.postgres.outbox.SequenceWatcher", Counting)
    async with relaying(restricted, settings=polling) as idle:
        await idle.until(lambda: looks > 5)
        event_id = uuid4()
        await conn.execute(INSERT, event_id)
        await idle.until(lambda: idle.confirmed == [str(event_id)])
    warnings = [record for record in caplog.records if record.name == wakeup.__name__]
    assert [record.getMessage() for record in warnings] == [
        "the relay cannot read the id sequence, and finds events of idle periods by polling only"
    ]
    assert "GRANT SELECT ON SEQUENCE outrider.outbox_id_seq" in vars(warnings[0])["remedy"]
