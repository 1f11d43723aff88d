"""Query plans of PostgreSQL for an inbox with 200,000 receipts and 50,000 held events, with stale statistics too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outrider.stores.postgres import PostgresInbox, statements
from tests.support.postgres_databases import DatabasePool
from tests.support.postgres_plans import indexed_tables, used_indexes

pytestmark = pytest.mark.postgres

TABLES = ("consumer_inbox", "inbox_stream", "inbox_held", "inbox_dead_letter")
FILL = """
INSERT INTO outrider.consumer_inbox
SELECT 'billing', gen_random_uuid(), 'order.placed', 'orders', 'k' || i % 5000, i,
    clock_timestamp() - i * interval '1 second', 0.01
FROM generate_series(1, 200000) AS i;
INSERT INTO outrider.inbox_stream
SELECT 'billing', 'orders', 'k' || i, 1, i, CASE WHEN i % 500 = 0 THEN 'draining' WHEN i % 500 = 1 THEN 'early' END,
    CASE WHEN i % 500 < 2 THEN 500 ELSE 0 END, clock_timestamp() - i * interval '1 second'
FROM generate_series(1, 50000) AS i;
INSERT INTO outrider.inbox_held (consumer, event_id, event_type, topic, key, band, sequence, headers, body, partition,
    position, replayed, received_at)
SELECT 'billing', gen_random_uuid(), 'order.placed', 'orders', 'k' || i % 100 * 500, 1, i, '{}', 'xxxxxxxxx', '',
    '', false, clock_timestamp()
FROM generate_series(1, 50000) AS i;
INSERT INTO outrider.inbox_dead_letter
SELECT 1000000 + i, 'billing', gen_random_uuid(), 'order.placed', 'orders', 'd' || i, 1, i, NULL, '{}', '', '', '',
    false, clock_timestamp(), 'poison_message', '{}', CASE WHEN i % 2 = 0 THEN 'block' ELSE 'skip' END, 1,
    clock_timestamp() - i * interval '1 second'
FROM generate_series(1, 20000) AS i;
"""


@pytest.fixture(scope="module", params=[True, False], ids=["analyzed", "statistics of empty tables"])
def filled_url(request: pytest.FixtureRequest, database_pool: DatabasePool) -> Iterator[str]:
    """Tables that filled after they were last analyzed, or that were analyzed since. Tests take back their writes."""
    url = asyncio.run(database_pool.take(fresh=True))
    asyncio.run(_fill(url, analyze=request.param))
    yield url
    asyncio.run(database_pool.give_back(url, reusable=False))


async def _fill(url: str, *, analyze: bool) -> None:
    analysis = "; ".join(f"ANALYZE outrider.{table}" for table in TABLES)
    conn = await asyncpg.connect(url)
    await conn.execute("; ".join(f"ALTER TABLE outrider.{table} SET (autovacuum_enabled = off)" for table in TABLES))
    await conn.execute(analysis)
    await conn.execute(FILL)
    if analyze:
        await conn.execute(analysis)
    await conn.close()


@pytest.fixture
async def conn(filled_url: str) -> AsyncIterator[Any]:
    """A connection to the filled tables."""
    conn = await asyncpg.connect(filled_url)
    yield conn
    await conn.close()


@pytest.fixture
async def inbox(filled_url: str) -> AsyncIterator[PostgresInbox]:
    """An inbox store over the filled tables."""
    inbox = await PostgresInbox.open(filled_url)
    yield inbox
    await inbox.close()


async def test_recording_receipts_reads_only_its_own_rows(inbox: PostgresInbox, conn: Any) -> None:
    ids = sorted(uuid4() for _ in range(100))
    keys = [f"k{n}" for n in range(1, 101)]
    read = await indexed_tables(conn, 1, inbox._sql["record_receipt"], "billing", ids[0], "t", "orders", "k7", 8, 1)
    assert read == {"inbox_stream"}
    batch = "billing", ids, ["t"] * 100, ["orders"] * 100, keys, [1] * 100
    assert await used_indexes(conn, 100, inbox._sql["record_receipts"], *batch) == {"inbox_held_event"}
    streams = "billing", ["orders"] * 100, keys, [1] * 100
    assert await used_indexes(conn, 100, inbox._sql["lock_streams"], *streams) == {"inbox_stream_pkey"}


async def test_recording_outcomes_reads_only_the_rows_it_writes(inbox: PostgresInbox, conn: Any) -> None:
    known = [row[0] for row in await conn.fetch("SELECT event_id FROM outrider.consumer_inbox LIMIT 100")]
    waiting = [row[0] for row in await conn.fetch("SELECT event_id FROM outrider.inbox_held LIMIT 100")]
    seconds, nothing = [0.1] * 100, [None] * 100
    ordering = ["orders"] * 100, [f"k{n}" for n in range(100)], [1] * 100, [9] * 100, nothing, [0] * 100
    why = ["poison_message"] * 100, ["{}"] * 100, ["block"] * 100, [1] * 100
    receipt, event = {"consumer_inbox_pkey"}, {"inbox_held_event"}
    await indexed_tables(conn, 1, inbox._sql["finish_receipt"], "billing", known[0], 0.1)
    stream = "orders", "k7", 1, 9, None, 0
    await indexed_tables(conn, 1, inbox._sql["finish_and_save_stream"], "billing", *stream, known[0], 0.1)
    assert await used_indexes(conn, 100, inbox._sql["finish_receipts"], "billing", known, seconds) == receipt
    assert (
        await used_indexes(conn, 100, inbox._sql["finish_and_save_streams"], "billing", *ordering, known, seconds)
        == receipt
    )
    assert await used_indexes(conn, 100, inbox._sql["withdraw_receipts"], "billing", known) == receipt
    assert await used_indexes(conn, 100, inbox._sql["withdraw_held"], "billing", known) == receipt | event
    assert await used_indexes(conn, 100, inbox._sql["remove_held"], "billing", waiting) == event
    assert await used_indexes(conn, 100, inbox._sql["dead_letter"], "billing", waiting, *why) == event


async def test_draining_streams_and_their_held_events_are_found_through_indexes(
    inbox: PostgresInbox, conn: Any
) -> None:
    assert await used_indexes(conn, 20, inbox._sql["draining"], "billing", "draining", 20) == {"inbox_stream_cause"}
    assert await used_indexes(conn, 20, inbox._sql["overdue"], "billing", 60.0, 20) == {"inbox_stream_cause"}
    stream = "billing", "orders", "k500", 1
    assert await used_indexes(conn, 1, inbox._sql["lock_unless_taken"], *stream) == {"inbox_stream_pkey"}
    assert await used_indexes(conn, 10, inbox._sql["claim_in_order"], *stream, 10) == {"inbox_held_pkey"}
    assert await used_indexes(conn, 10, inbox._sql["claim_by_sequence"], *stream, 10) == {"inbox_held_sequence"}


async def test_pruning_reads_the_oldest_and_nothing_else(inbox: PostgresInbox, conn: Any) -> None:
    receipts = await used_indexes(conn, 1000, inbox._sql["prune_receipts"], "billing", 1.0, 1000)
    assert receipts == {"consumer_inbox_age", "consumer_inbox_pkey", "inbox_dead_letter_event"}
    dead = await used_indexes(conn, 1000, inbox._sql["prune_dead_letters"], "billing", 0.01, 1000)
    assert dead == {"inbox_dead_letter_age", "inbox_dead_letter_pkey"}


async def test_a_persons_work_reads_only_the_streams_it_is_about(inbox: PostgresInbox, conn: Any) -> None:
    admin = statements.load_inbox("outrider")
    ids = list(range(1_000_001, 1_000_011))
    streams = ["billing"] * 10, ["orders"] * 10, [f"k{n}" for n in range(10)], [1] * 10
    used = await used_indexes(conn, 10, admin["replay"], ids)
    used |= await used_indexes(conn, 10, admin["lock_dead_letter_streams"], ids)
    used |= await used_indexes(conn, 10, admin["drain_unblocked"], *streams, [None] * 10, [1] * 10)
    used |= await used_indexes(conn, 10, admin["forget_empty_streams"], *streams)
    used |= await used_indexes(conn, 1, admin["first_early"], "billing", "orders", "k500", 1, 5)
    assert not used & set(TABLES)
