"""The textbook outbox, for comparison: claim rows with SKIP LOCKED, publish, mark rows as sent.

Two variants. The one found in articles claims a batch, then publishes and marks row by row, so that a crash repeats one
event at most. The better one marks the whole batch in one statement. Both have a partial index on what is pending and
prepared statements; neither keeps any order.
"""

from __future__ import annotations

from typing import Any

import asyncpg

BATCH = 100

SETUP = """
DROP TABLE IF EXISTS textbook;
CREATE TABLE textbook (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id uuid NOT NULL UNIQUE DEFAULT gen_random_uuid(),
    event_type text NOT NULL, aggregate_type text, aggregate_id text, topic text, payload json NOT NULL,
    headers json NOT NULL DEFAULT '{}', status text NOT NULL DEFAULT 'pending',
    claimed_by text, claimed_until timestamptz, attempts int NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(), sent_at timestamptz
);
CREATE INDEX textbook_pending ON textbook (created_at, id) WHERE status IN ('pending', 'claimed');
"""

LEFT = "SELECT count(*) FROM textbook WHERE status <> 'sent'"

CLAIM = """
UPDATE textbook SET status = 'claimed', claimed_by = $1, claimed_until = now() + interval '30 seconds',
    attempts = attempts + 1
WHERE id IN (
    SELECT id FROM textbook WHERE status = 'pending' OR (status = 'claimed' AND claimed_until < now())
    ORDER BY created_at, id LIMIT $2 FOR UPDATE SKIP LOCKED)
RETURNING id, event_id, event_type, aggregate_type, aggregate_id, topic, payload, headers, created_at
"""

MARK = "UPDATE textbook SET status = 'sent', sent_at = now() WHERE id = ANY ($1::bigint[]) AND claimed_by = $2"


async def row_by_row(url: str, publish: Any) -> None:
    """Drain the table: every row is published and marked by itself."""
    conn = await asyncpg.connect(url)
    try:
        claim, mark = await conn.prepare(CLAIM), await conn.prepare(MARK)
        while rows := await claim.fetch("textbook", BATCH):
            for row in rows:
                await publish([row])
                await mark.fetch([row["id"]], "textbook")
    finally:
        await conn.close()


async def in_batches(url: str, publish: Any) -> None:
    """Drain the table: every batch is published and marked as one."""
    conn = await asyncpg.connect(url)
    try:
        claim, mark = await conn.prepare(CLAIM), await conn.prepare(MARK)
        while rows := await claim.fetch("textbook", BATCH):
            await publish(rows)
            await mark.fetch([row["id"] for row in rows], "textbook")
    finally:
        await conn.close()
