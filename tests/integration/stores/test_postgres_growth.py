"""A burst on PostgreSQL, after the server has cached the plans of all statements for an empty outbox."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

import outrider
from outrider.brokers.base import CONFIRMED, Nacked, PublishResult
from outrider.event import Message
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.retry import RetryPolicy
from outrider.stores.postgres import PostgresStore
from outrider.testing import MemoryBroker
from outrider.testing.harness import order
from tests.support.postgres_databases import end_pooled_sessions, name_of
from tests.support.postgres_growth import WARM_UP, rows_read

pytestmark = pytest.mark.postgres

BURST, KEYS = 6_000, 300
INSERT = """
INSERT INTO outrider.outbox (event_type, aggregate_id, topic, payload)
SELECT 'order.placed', 'k' || ($2 + i) % $3, 'orders', '{"pad": "xxxxxxxxxxxxxxxxxxxx"}'
FROM generate_series(1, $1::integer) AS i
"""
ANALYZE = "VACUUM (ANALYZE) outrider.outbox, outrider.outbox_blocked, outrider.outbox_archive"
LEFT = "SELECT EXISTS (SELECT FROM outrider.outbox) OR EXISTS (SELECT FROM outrider.outbox_blocked)"


class FirstAttemptFails:
    """A script that rejects the first message of each key."""

    def __init__(self) -> None:
        self.failed: set[str | None] = set()

    def __call__(self, message: Message) -> PublishResult:
        if message.key in self.failed:
            return CONFIRMED
        self.failed.add(message.key)
        return Nacked("try again")


async def _warm_up(relay: Relay, conn: Any) -> None:
    """Run every statement often enough for a cached plan, while the outbox is as good as empty."""
    await conn.execute(ANALYZE)
    for number in range(WARM_UP):
        await conn.execute(INSERT, 3, 100_000 + 10 * number, 1_000_000)
        await conn.execute(INSERT, 3, 100_000 + 10 * number, 1_000_000)
        await _drain(relay, conn)
    await conn.execute(ANALYZE)
    await relay.run_once()


async def _drain(relay: Relay, conn: Any) -> None:
    while await conn.fetchval(LEFT):
        await relay.run_once()


@pytest.mark.parametrize("script", [None, FirstAttemptFails()], ids=["confirmed", "first attempt fails"])
async def test_a_burst_after_a_quiet_time_is_read_and_settled_through_indexes(
    postgres_url: str, conn: Any, script: FirstAttemptFails | None
) -> None:
    store = await PostgresStore.open(postgres_url, connections_max=1)
    await _check_burst(store, conn, script)
    await store.close()
    read = await rows_read(conn, "outbox", "outbox_blocked")
    assert read["outbox"] < 20 * BURST
    assert read["outbox_blocked"] < 20 * BURST


@pytest.mark.pgbouncer
async def test_a_burst_after_a_quiet_time_is_read_through_indexes_behind_a_pooler(
    postgres_url: str, conn: Any, pgbouncer_url: str
) -> None:
    through = urlsplit(pgbouncer_url)._replace(path=urlsplit(postgres_url).path).geturl()
    store = await PostgresStore.open(through, connections_max=1, pooled=True)
    await _check_burst(store, conn, None)
    await store.close()
    await end_pooled_sessions(pgbouncer_url, name_of(postgres_url))
    read = await rows_read(conn, "outbox", "outbox_blocked")
    assert read["outbox"] < 20 * BURST


@pytest.mark.parametrize(
    "fields", [{"supplied": True}, {"sequence": "auto"}, {"supplied": True, "sequence": "auto"}], ids=str
)
async def test_staging_beside_a_backlog_reads_only_its_own_rows(
    postgres_url: str, conn: Any, fields: dict[str, Any]
) -> None:
    tables = f"{ANALYZE}, outrider.outbox_counter, outrider.outbox_dead_letter"
    # The application's own connection, which keeps plans as well.
    application = await asyncpg.connect(postgres_url, server_settings={"application_name": "outrider"})

    async def stage(number: int) -> None:
        given = {name: value for name, value in fields.items() if name != "supplied"}
        ids = [{"event_id": uuid4()} if fields.get("supplied") else {} for _ in range(2)]
        async with application.transaction():
            await outrider.stage(application, *(order(number, f"s{number}", **given, **each) for each in ids))

    await conn.execute(tables)
    for number in range(WARM_UP):
        await stage(number)
        await conn.execute("DELETE FROM outrider.outbox; DELETE FROM outrider.outbox_counter")
    await conn.execute(tables)
    await stage(WARM_UP)
    await conn.execute(INSERT, BURST, 0, KEYS)
    await conn.execute("SELECT pg_stat_reset()")
    for number in range(100, 150):
        await stage(number)
    await application.close()
    read = await rows_read(conn, "outbox", "outbox_blocked")
    assert read["outbox"] < BURST


async def _check_burst(store: PostgresStore, conn: Any, script: FirstAttemptFails | None) -> None:
    broker = MemoryBroker(script=script)
    settings = RelaySettings(
        workers=1, lease_seconds=600, retry=RetryPolicy(base_seconds=0.001, cap_seconds=0.001, jitter=0)
    )
    relay = Relay(store, broker, settings)
    await relay.heartbeat()
    await _warm_up(relay, conn)
    await conn.execute("SELECT pg_stat_reset()")
    await conn.execute(INSERT, BURST, 0, KEYS)
    await _drain(relay, conn)
    assert len({message.message_id for message in broker.log}) == BURST + 6 * WARM_UP
