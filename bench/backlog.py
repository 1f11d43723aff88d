"""The same backlog again and again: staged in PostgreSQL, or as messages in memory."""

from __future__ import annotations

import asyncpg

from outrider.event import Message
from outrider.outbox.model import Lease
from outrider.stores.postgres import PostgresSchema, PostgresStore
from outrider.wire import encode

TOPIC = "orders"
READER = "bench"
# Half a kilobyte that compresses as JSON does, about two to one.
PREPARE = """
DROP TABLE IF EXISTS bench_orders;
CREATE UNLOGGED TABLE bench_orders AS
SELECT i, json_build_object('order', i, 'pad', (
    SELECT string_agg(md5((i * 16 + part)::text), '') FROM generate_series(1, 15) AS part)) AS payload
FROM generate_series(1, {events}) AS i
"""
EMPTY = "TRUNCATE outrider.outbox, outrider.outbox_archive"
FILL = f"""
INSERT INTO outrider.outbox (event_type, aggregate_type, aggregate_id, topic, payload)
SELECT 'order.placed', 'order', 'k' || i % $2::integer, '{TOPIC}', payload
FROM bench_orders WHERE i <= $1::integer ORDER BY i
"""


async def prepare(url: str, events: int) -> None:
    """Install the outbox and write the payloads down once."""
    await PostgresSchema(url).migrate()
    conn = await asyncpg.connect(url)
    await conn.execute(PREPARE.format(events=events))
    await conn.close()


async def fill(url: str, events: int, keys: int) -> None:
    """Begin anew: empty tables, and so many events of so many keys in the outbox."""
    conn = await asyncpg.connect(url)
    await conn.execute(EMPTY)
    await conn.execute(FILL, events, keys)
    await conn.execute("VACUUM (ANALYZE) outrider.outbox")
    await conn.close()


async def messages(url: str, events: int) -> list[Message]:
    """Return what a relay would publish of the backlog, in order: the same bodies, keys and headers."""
    store = await PostgresStore.open(url)
    await store.heartbeat(READER, 60, first=True)
    lease: Lease = await store.claim(READER, range(3 * store.lanes))
    fetched = await store.fetch(lease, dict.fromkeys(lease.epochs, events))
    await store.leave(READER)
    await store.close()
    return [encode(event, event.stream.topic) for event in sorted(fetched.events)]
