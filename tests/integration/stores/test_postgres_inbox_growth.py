"""An inbox on PostgreSQL whose tables have filled since the server cached the plans of all statements."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from outrider.errors import Permanent
from outrider.stores.postgres import PostgresInbox
from outrider.telemetry.events import ConsumerDeadLettered
from outrider.testing import ManualClock
from outrider.testing.contracts import delivery
from outrider.testing.harness import ConsumerHarness
from tests.support.postgres_benches import EFFECTS, PostgresInboxBench
from tests.support.postgres_growth import WARM_UP, rows_read

pytestmark = pytest.mark.postgres

TABLES = ("consumer_inbox", "inbox_stream", "inbox_held", "inbox_dead_letter")
ANALYZE = "VACUUM (ANALYZE) " + ", ".join(f"outrider.{table}" for table in TABLES)
FILL = """
INSERT INTO outrider.consumer_inbox
SELECT 'billing', gen_random_uuid(), 'order.placed', 'orders', 'f' || i, i, clock_timestamp(), 0.01
FROM generate_series(1, 6000) AS i;
INSERT INTO outrider.inbox_stream
SELECT 'billing', 'orders', 'f' || i, 0, i, NULL, 0, clock_timestamp() FROM generate_series(1, 6000) AS i;
INSERT INTO outrider.inbox_held (consumer, event_id, event_type, topic, key, band, sequence, headers, body, partition,
    position, replayed, received_at)
SELECT 'other', gen_random_uuid(), 'order.placed', 'orders', 'f' || i, 0, i, '{}', '', '', '', false, clock_timestamp()
FROM generate_series(1, 6000) AS i;
INSERT INTO outrider.inbox_dead_letter
SELECT 1000000 + i, 'other', gen_random_uuid(), 'order.placed', 'orders', 'f' || i, 0, i, NULL, '{}', '', '', '',
    false, clock_timestamp(), 'poison_message', '{}', 'block', 1, clock_timestamp()
FROM generate_series(1, 6000) AS i;
"""
FILLED, ROUNDS, ATTEMPTS_MAX = 6_000, 40, 3


async def _use(consumer: ConsumerHarness, bench: PostgresInboxBench, number: int, at_once: int) -> None:
    """Handle events that arrive in order, too early, and for a handler that rejects one of them for ever."""
    keys = [f"k{number}-{each}" for each in range(at_once)]
    for key in keys:
        bench.fail(f"{key}:4", *[Permanent("never")] * 10)
    for step in (1, 3, 2, 4, 5):
        batch = [delivery(step, key=key) for key in keys]
        for _ in range(ATTEMPTS_MAX):
            if await consumer.deliver(*batch) == at_once:
                break
        await consumer.executor.wait_for_drains()
    dead = [found.dead_letter for found in bench.observer.of(ConsumerDeadLettered) if found.dead_letter]
    bench.observer.events.clear()
    assert len(dead) == at_once
    bench.failing.clear()
    await bench.store.admin.replay(dead, "ann")
    await consumer.run_maintenance()
    await consumer.executor.wait_for_drains()


@pytest.mark.parametrize("at_once", [1, 5])
@pytest.mark.parametrize("ordering", ["off", "strict"])
async def test_a_consumer_reads_only_its_own_rows_after_the_tables_have_filled(
    postgres_url: str, conn: Any, ordering: str, at_once: int
) -> None:
    inbox = await PostgresInbox.open(postgres_url, connections_max=1)
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool:
        await pool.execute(EFFECTS)
        bench = PostgresInboxBench(inbox, ManualClock(), pool)
        consumer = bench.consumer(ordering=ordering, batch_max=10)
        await conn.execute(ANALYZE)
        for number in range(WARM_UP):
            await _use(consumer, bench, number, at_once)
        await conn.execute(ANALYZE)
        await _use(consumer, bench, WARM_UP, at_once)
        await conn.execute(FILL)
        await conn.execute("SELECT pg_stat_reset()")
        for number in range(ROUNDS):
            await _use(consumer, bench, 1000 + number, at_once)
    await inbox.close()
    read = await rows_read(conn, *TABLES)
    assert max(read.values()) < FILLED * at_once, read
