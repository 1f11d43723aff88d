"""The least that could be called a relay to Kafka: fetch, produce, delete. What it costs is the floor for any other.

It has no lease and no fence, so there can be only one; it sorts nothing into streams, retries nothing, keeps no
archive, and builds the same headers as ours in place. It waits for its standard input before it begins.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import asyncpg
import confluent_kafka

from outrider.brokers.kafka import settings

WORKERS, LANES, BATCH_MAX = 4, 96, 4_000
TICK_SECONDS = 0.001
FETCH = f"""
SELECT event_id, coalesce(key, aggregate_id, event_id::text), topic, event_type, aggregate_type, payload, created_at
FROM outrider.outbox WHERE lane = ANY ($1::smallint[]) AND state = 'pending' ORDER BY lane, id LIMIT {BATCH_MAX}
"""
DELETE = "DELETE FROM outrider.outbox WHERE event_id = ANY ($1::uuid[])"


async def main(url: str, bootstrap: str) -> None:
    """Connect, say so, wait for the word, drain, say so."""
    options = {"synchronous_commit": "off"}
    pool = await asyncpg.create_pool(url, min_size=WORKERS, max_size=WORKERS, init=_raw_json, server_settings=options)
    producer = confluent_kafka.Producer(settings.complete(bootstrap, {}))
    producer.list_topics(timeout=10)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(_drain(pool, producer, range(worker, LANES, WORKERS)) for worker in range(WORKERS)))
    print("done", flush=True)
    await pool.close()


async def _raw_json(conn: Any) -> None:
    await conn.set_type_codec("json", schema="pg_catalog", encoder=bytes, decoder=bytes, format="binary")


async def _drain(pool: asyncpg.Pool, producer: Any, lanes: range) -> None:
    async with pool.acquire() as conn:
        while rows := await conn.fetch(FETCH, list(lanes)):
            await _publish(producer, rows)
            await conn.execute(DELETE, [row[0] for row in rows])


async def _publish(producer: Any, rows: list[Any]) -> None:
    received: list[Any] = []
    for event_id, key, topic, event_type, kind, body, at in rows:
        message_id = str(event_id)
        headers = {
            "event_type": event_type,
            "key": key,
            "schema_version": "1",
            "created_at": at.isoformat(),
            "correlation_id": message_id,
            "causation_id": message_id,
            "trace_id": event_id.hex,
            "message_id": message_id,
            "aggregate_type": kind,
            "aggregate_id": key,
        }
        producer.produce(topic, body, key, on_delivery=lambda error, _: received.append(error), headers=headers)
    while len(received) < len(rows):
        producer.poll(0)
        await asyncio.sleep(TICK_SECONDS)
    assert not any(received), "a message was not confirmed"


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
