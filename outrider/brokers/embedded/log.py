"""The log itself: plain functions over a connection, each one transaction.

Entries are appended under SQLite's write lock, so offsets grow in the order of commits: a reader that has seen an
offset will never find a smaller one it has not seen.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from outrider.event import Message

BUSY_SECONDS = 3.0
"""How long a statement waits for another process."""

PRUNE_MAX = 5_000
"""Entries removed in one transaction."""

WHOLE_LOG = ""
"""Stands for every topic in a consumer's place in the log."""

_COLUMNS = '"offset", topic, key, message_id, routing_key, headers, body, published_at'
_INSERT = """INSERT INTO log (topic, key, message_id, routing_key, headers, body, published_at)
VALUES (:topic, :key, :message_id, :routing_key, :headers, :body, :now)"""
# The oldest entries have the smallest offsets, so the primary key is all that pruning needs.
_PRUNE = """DELETE FROM log WHERE "offset" IN (
    SELECT "offset" FROM (SELECT "offset", published_at FROM log ORDER BY "offset" LIMIT :limit)
    WHERE published_at < :before
)"""
_PROBE = "INSERT INTO probe (id, at) VALUES (1, :now) ON CONFLICT (id) DO UPDATE SET at = excluded.at"
_FROM_ALL = f'SELECT {_COLUMNS} FROM log WHERE "offset" > :after ORDER BY "offset" LIMIT :limit'  # noqa: S608
_FROM_TOPIC = f'SELECT {_COLUMNS} FROM log WHERE topic = :topic AND "offset" > :after ORDER BY "offset" LIMIT :limit'  # noqa: S608
_PLACE = 'SELECT "offset" FROM consumer WHERE consumer = :consumer AND topic = :topic'
_SUBSCRIBE = 'INSERT INTO consumer (consumer, topic, "offset") VALUES (:consumer, :topic, 0) ON CONFLICT DO NOTHING'
_COMMIT = """UPDATE consumer SET "offset" = max("offset", :offset)
WHERE consumer = :consumer AND (:topics IS NULL OR topic IN (SELECT value FROM json_each(:topics)))"""
# Leaps from topic to topic along the index instead of reading every entry.
_TOPICS = """WITH RECURSIVE found (topic) AS (
    SELECT min(topic) FROM log UNION ALL SELECT (SELECT min(topic) FROM log WHERE topic > found.topic) FROM found
    WHERE found.topic IS NOT NULL
) SELECT topic FROM found WHERE topic IS NOT NULL"""


class Entry(NamedTuple):
    """One entry of the log, as a consumer gets it."""

    offset: int
    message: Message
    published_at: datetime


def connect(path: Path) -> sqlite3.Connection:
    """Open the log, and create it if it is not there."""
    conn = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _use_wal(conn)
        conn.execute("PRAGMA synchronous = FULL")
        statements = (files("outrider.brokers.embedded") / "schema.sql").read_text().split(";")
        with transaction(conn):
            for statement in statements:
                conn.execute(statement)
    except BaseException:
        conn.close()
        raise
    return conn


def _use_wal(conn: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. SQLite does not wait for its turn when it switches, so this does."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            conn.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


@contextmanager
def transaction(conn: sqlite3.Connection) -> Iterator[None]:
    """Commit when the block ends, roll back when it raises; wait for other writers at the start, not half-way."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def append(conn: sqlite3.Connection, messages: Sequence[Message], now: float) -> None:
    """Add messages to the end, all or none."""
    rows = [{**message._asdict(), "headers": json.dumps(message.headers), "now": now} for message in messages]
    with transaction(conn):
        conn.executemany(_INSERT, rows)


def prune(conn: sqlite3.Connection, before: float) -> int:
    """Remove some of what is older; return how many."""
    with transaction(conn):
        return conn.execute(_PRUNE, {"before": before, "limit": PRUNE_MAX}).rowcount


def probe(conn: sqlite3.Connection, now: float) -> None:
    """Write something of no consequence, to see that writing works."""
    with transaction(conn):
        conn.execute(_PROBE, {"now": now})


def after(conn: sqlite3.Connection, topics: Sequence[str] | None, offset: int, limit: int) -> list[Entry]:
    """Return entries behind an offset."""
    return behind(conn, dict.fromkeys(_names(topics), offset), limit)


def read(conn: sqlite3.Connection, consumer: str, topics: Sequence[str] | None, limit: int) -> list[Entry]:
    """Return what a consumer has not committed yet, in the order of the log."""
    return behind(conn, places(conn, consumer, topics), limit)


def places(conn: sqlite3.Connection, consumer: str, topics: Sequence[str] | None) -> dict[str, int]:
    """Return how far a consumer has committed, by topic."""
    return {topic: _place(conn, consumer, topic) for topic in _names(topics)}


def behind(conn: sqlite3.Connection, places: Mapping[str, int], limit: int) -> list[Entry]:
    """Return the entries behind a place in each topic, in the order of the log."""
    return _merge([_entries(conn, topic, offset, limit) for topic, offset in places.items()], limit)


def commit(conn: sqlite3.Connection, consumer: str, offset: int, topics: Sequence[str] | None) -> None:
    """Move a consumer's place forward; it never goes back."""
    wanted = None if topics is None else json.dumps(list(topics))
    with transaction(conn):
        conn.execute(_COMMIT, {"consumer": consumer, "offset": offset, "topics": wanted})


def topics(conn: sqlite3.Connection) -> list[str]:
    """List the topics that have entries."""
    return [topic for (topic,) in conn.execute(_TOPICS)]


def _names(chosen: Sequence[str] | None) -> list[str]:
    return [WHOLE_LOG] if chosen is None else sorted(set(chosen))


def _place(conn: sqlite3.Connection, consumer: str, topic: str) -> int:
    """Return where a consumer stands in a topic. Its first read writes it down, so that a commit knows its topics."""
    names = {"consumer": consumer, "topic": topic}
    if (found := conn.execute(_PLACE, names).fetchone()) is None:
        with transaction(conn):
            conn.execute(_SUBSCRIBE, names)
        return 0
    return int(found[0])


def _entries(conn: sqlite3.Connection, topic: str, offset: int, limit: int) -> list[Entry]:
    query = _FROM_ALL if topic == WHOLE_LOG else _FROM_TOPIC
    return [_entry(row) for row in conn.execute(query, {"topic": topic, "after": offset, "limit": limit})]


def _merge(runs: Sequence[list[Entry]], limit: int) -> list[Entry]:
    return list(heapq.merge(*runs, key=lambda entry: entry.offset))[:limit]


def _entry(row: Sequence[Any]) -> Entry:
    offset, topic, key, message_id, routing_key, headers, body, published_at = row
    message = Message(message_id, topic, key, routing_key, bytes(body), json.loads(headers))
    return Entry(offset, message, datetime.fromtimestamp(published_at, UTC))
