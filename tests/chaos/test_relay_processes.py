"""Relay processes on a real PostgreSQL, stopped and killed by real signals."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import outrider
from outrider.testing.harness import order
from tests.support.relay_process import (
    QUICK,
    RelayProcess,
    at,
    everything,
    first_deliveries,
    relays,
    until,
)

pytestmark = [pytest.mark.postgres, pytest.mark.chaos]

EVENTS = 1500
KEYS = [f"k{n}" for n in range(40)]
SMALL_STEPS = (*QUICK, "--batch-max", "50")


async def _write(conn: Any, rounds: range) -> None:
    for number in rounds:
        async with conn.transaction():
            await outrider.stage(conn, *[order(number, key, sequence="auto") for key in KEYS])


EMPTY = "an empty outbox", "SELECT count(*) = 0 FROM outrider.outbox"
OWNED = "every lane to have an owner", "SELECT count(owner) = count(*) FROM outrider.outbox_lane"
STARTED = "relays to start", "SELECT count(*) >= $1 FROM outrider.outbox_relay"
SENT = "some progress", "SELECT count(*) >= $1 FROM outrider.outbox_archive"


async def _reach(conn: Any, goal: tuple[str, str], *args: Any) -> None:
    await until(goal[0], conn, goal[1], *args)


def _complete(rounds: int) -> dict[str, list[int]]:
    return {key: list(range(1, rounds + 1)) for key in KEYS}


async def test_relays_killed_in_the_middle_lose_nothing_and_keep_the_order(
    conn: Any, postgres_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.db"
    async with relays(postgres_url, at(log), tmp_path, 2, *SMALL_STEPS) as crew:
        for turn in range(3):
            await _write(conn, range(turn * 50, turn * 50 + 50))
            await _reach(conn, SENT, turn * 2000 + 200)
            await crew.pop(0).kill()
            crew.append(await RelayProcess.start(postgres_url, at(log), tmp_path, *SMALL_STEPS))
        await _reach(conn, EMPTY)
    assert first_deliveries(await everything(log)) == _complete(150)


async def test_a_relay_stopped_past_its_lease_changes_nothing_when_it_wakes(
    conn: Any, postgres_url: str, tmp_path: Path
) -> None:
    # A process stopped in the middle of a write keeps the lock of its log file, so each relay has a log of its own.
    logs = tmp_path / "one.db", tmp_path / "two.db"
    async with (
        relays(postgres_url, at(logs[0]), tmp_path, 1, *SMALL_STEPS) as [one],
        relays(postgres_url, at(logs[1]), tmp_path, 1, *SMALL_STEPS) as [two],
    ):
        crew = [one, two]
        await _reach(conn, STARTED, 2)
        for turn in range(2):
            await _write(conn, range(turn * 50, turn * 50 + 50))
            sleeper = crew[turn]
            sleeper.pause()
            # The other one takes the sleeper's lanes once its lease has ended, and finishes everything.
            await _reach(conn, EMPTY)
            sleeper.resume()
            await _write(conn, range(1000 + turn, 1001 + turn))
            await _reach(conn, EMPTY)
        assert [await relay.stop() for relay in crew] == [0, 0]
    assert first_deliveries(await everything(*logs)) == _complete(102)
    assert await conn.fetchval("SELECT count(*) FROM outrider.outbox_blocked") == 0


FILL = """
INSERT INTO outrider.outbox (event_type, aggregate_id, topic, payload)
SELECT 'order.placed', 'k' || i, 'orders', json_build_object('pad', repeat('x', 200000))
FROM generate_series(1, $1::integer) AS i
"""
FETCH = """
SELECT count(*) > 0 FROM pg_stat_activity
WHERE {} AND query LIKE '%WITH owned%' AND datname = current_database()
"""
WAITING = "a fetch to wait at the gate", FETCH.format("wait_event = 'advisory'")
UNREAD = (
    "a fetch whose result is not read, or whose transaction is not ended",
    FETCH.format("(wait_event = 'ClientWrite' OR state = 'idle in transaction')"),
)
GATED_CLOCK = """
CREATE OR REPLACE FUNCTION outrider.outbox_clock() RETURNS timestamptz LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(1);
    RETURN clock_timestamp();
END
$$
"""
"""A clock that a fetch reads while it runs, and that waits while the gate is closed."""


async def _freeze_in_a_fetch(conn: Any, relay: RelayProcess) -> None:
    """Stop a relay while the server answers its fetch."""
    await conn.execute("SELECT pg_advisory_lock(1)")
    await _reach(conn, WAITING)
    relay.pause()
    await conn.execute("SELECT pg_advisory_unlock(1)")
    await _reach(conn, UNREAD)


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "through PgBouncer"])
async def test_a_relay_frozen_in_a_fetch_loses_its_lanes_at_the_end_of_its_lease(
    conn: Any, postgres_url: str, pgbouncer_url: str, tmp_path: Path, pooled: bool
) -> None:
    logs = tmp_path / "one.db", tmp_path / "two.db"
    through = urlsplit(pgbouncer_url)._replace(path=urlsplit(postgres_url).path, query="pooled=true").geturl()
    url = through if pooled else postgres_url
    await conn.execute(GATED_CLOCK)
    await conn.execute(FILL, EVENTS)
    # One worker reads all lanes at once, more than fits into the buffers between the server and a relay without pooler.
    async with relays(url, at(logs[0]), tmp_path, 1, *QUICK, "--workers", "1") as [frozen]:
        await _reach(conn, OWNED)
        await _freeze_in_a_fetch(conn, frozen)
        async with relays(url, at(logs[1]), tmp_path, 1, *QUICK):
            await _reach(conn, EMPTY)
    keys = {message.key for message in await everything(*logs)}
    assert keys == {f"k{n}" for n in range(1, EVENTS + 1)}


async def test_a_clean_stop_and_restart_repeats_nothing(conn: Any, postgres_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    await _write(conn, range(100))
    for _ in range(3):
        async with relays(postgres_url, at(log), tmp_path, 1, *SMALL_STEPS) as [relay]:
            await _reach(conn, STARTED, 1)
            assert await relay.stop() == 0
        assert await conn.fetchval("SELECT count(*) FROM outrider.outbox_relay") == 0
        assert await conn.fetchval("SELECT count(owner) FROM outrider.outbox_lane") == 0
    async with relays(postgres_url, at(log), tmp_path, 2, *QUICK):
        await _reach(conn, EMPTY)
    messages = await everything(log)
    assert first_deliveries(messages) == _complete(100)
    assert len(messages) == 100 * len(KEYS)


async def test_several_processes_under_one_command_share_the_work(conn: Any, postgres_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    async with relays(postgres_url, at(log), tmp_path, 1, *QUICK, "--processes", "2") as [crew]:
        await _reach(conn, STARTED, 2)
        await _write(conn, range(50))
        await _reach(conn, EMPTY)
        assert await crew.stop() == 0
    assert first_deliveries(await everything(log)) == _complete(50)
    assert await conn.fetchval("SELECT count(*) FROM outrider.outbox_relay") == 0


async def test_the_database_going_away_for_a_moment_loses_nothing(conn: Any, postgres_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    end_sessions = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'outrider' AND datname = current_database()"
    )
    async with relays(postgres_url, at(log), tmp_path, 2, *SMALL_STEPS) as crew:
        # A relay that cannot reach the database when it starts says so and ends; this is about those that run.
        await _reach(conn, STARTED, 2)
        for turn in range(5):
            await _write(conn, range(turn * 20, turn * 20 + 20))
            await _reach(conn, SENT, turn * 800 + 100)
            await conn.execute(end_sessions)
        await _reach(conn, EMPTY)
        assert all(relay.running for relay in crew)
    assert first_deliveries(await everything(log)) == _complete(100)
