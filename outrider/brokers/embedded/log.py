"""The log: plain functions over a connection, one transaction per function.

Entries are appended under SQLite's write lock, so offsets grow in the order of commits: a reader that has seen an
offset has already seen every smaller offset.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from outrider.event import SUBJECT_HEADER, Message

BUSY_SECONDS = 3.0
"""Seconds for which a statement waits for another process."""

PRUNE_MAX = 5_000
"""Number of entries removed in one transaction."""

WHOLE_LOG = ""
"""Stands for all topics in a consumer's position."""

_COLUMNS = '"offset", topic, key, message_id, routing_key, headers, body, published_at'
_INSERT = """INSERT INTO log (topic, key, message_id, routing_key, headers, body, published_at)
VALUES (:topic, :key, :message_id, :routing_key, :headers, :body, :now)"""
# The oldest entries have the smallest offsets, so pruning needs only the primary key.
_PRUNE = """DELETE FROM log WHERE "offset" IN (
    SELECT "offset" FROM (SELECT "offset", published_at FROM log ORDER BY "offset" LIMIT :limit)
    WHERE published_at < :before
)"""
_PROBE = "INSERT INTO probe (id, at) VALUES (1, :now) ON CONFLICT (id) DO UPDATE SET at = excluded.at"
_FROM_ALL = f'SELECT {_COLUMNS} FROM log WHERE "offset" > :after ORDER BY "offset" LIMIT :limit'  # noqa: S608
_FROM_TOPIC = f'SELECT {_COLUMNS} FROM log WHERE topic = :topic AND "offset" > :after ORDER BY "offset" LIMIT :limit'  # noqa: S608
_POSITION = 'SELECT "offset" FROM consumer WHERE consumer = :consumer AND topic = :topic'
_SUBSCRIBE = 'INSERT INTO consumer (consumer, topic, "offset") VALUES (:consumer, :topic, 0) ON CONFLICT DO NOTHING'
_COMMIT = """UPDATE consumer SET "offset" = max("offset", :offset)
WHERE consumer = :consumer AND (:topics IS NULL OR topic IN (SELECT value FROM json_each(:topics)))"""
# Skips from topic to topic along the index instead of reading every entry.
_TOPICS = """WITH RECURSIVE found (topic) AS (
    SELECT min(topic) FROM log UNION ALL SELECT (SELECT min(topic) FROM log WHERE topic > found.topic) FROM found
    WHERE found.topic IS NOT NULL
) SELECT topic FROM found WHERE topic IS NOT NULL"""


_LAST = 'SELECT max("offset") FROM log'
_OF_SUBJECTS = """SELECT "offset", headers FROM log
WHERE "offset" > :after AND "offset" <= :end AND instr(headers, '"subject"') > 0"""
_ERASE = 'UPDATE log SET headers = :headers, body = :body WHERE "offset" = :offset'


class LogEntry(NamedTuple):
    """An entry of the log, as a consumer receives it."""

    offset: int
    message: Message
    published_at: datetime


class Marked(NamedTuple):
    """The offset and the headers of a message that has a subject."""

    offset: int
    headers: dict[str, str]


def connect(path: Path) -> sqlite3.Connection:
    """Open the log; create the file if missing."""
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
    """Switch to the write-ahead log. SQLite does not wait for a lock during the switch, so this function retries."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            conn.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextmanager
def transaction(conn: sqlite3.Connection) -> Iterator[None]:
    """Commit when the block ends, roll back when the block raises; wait for other writers at the start only."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def append(conn: sqlite3.Connection, messages: Sequence[Message], now: float) -> None:
    """Append messages to the log, all or none."""
    rows = [{**message._asdict(), "headers": json.dumps(message.headers), "now": now} for message in messages]
    with transaction(conn):
        conn.executemany(_INSERT, rows)


def prune(conn: sqlite3.Connection, before: float) -> int:
    """Remove a bounded number of entries older than `before`; return the number removed."""
    with transaction(conn):
        return conn.execute(_PRUNE, {"before": before, "limit": PRUNE_MAX}).rowcount


def of_subjects(conn: sqlite3.Connection, subjects: Collection[str], after: int) -> tuple[list[Marked], int | None]:
    """Return the messages of subjects in the next part of the log, and where the part after it begins (None: end)."""
    [[last]] = conn.execute(_LAST)
    rows = conn.execute(_OF_SUBJECTS, {"after": after, "end": after + PRUNE_MAX})
    found = [Marked(offset, json.loads(headers)) for offset, headers in rows]
    end = after + PRUNE_MAX
    return [each for each in found if each.headers.get(SUBJECT_HEADER) in subjects], None if end >= (last or 0) else end


def erase(conn: sqlite3.Connection, messages: Sequence[Marked], body: bytes) -> None:
    """Replace headers and bodies of messages. Deleted content does not stay in the free pages of the file."""
    conn.execute("PRAGMA secure_delete = ON")
    with transaction(conn):
        rows = [{"offset": each.offset, "headers": json.dumps(each.headers), "body": body} for each in messages]
        conn.executemany(_ERASE, rows)


def probe(conn: sqlite3.Connection, now: float) -> None:
    """Write a value without meaning, to test that writing works."""
    with transaction(conn):
        conn.execute(_PROBE, {"now": now})


def after(conn: sqlite3.Connection, topics: Sequence[str] | None, offset: int, limit: int) -> list[LogEntry]:
    """Return the entries after an offset."""
    return after_positions(conn, dict.fromkeys(_names(topics), offset), limit)


def read(conn: sqlite3.Connection, consumer: str, topics: Sequence[str] | None, limit: int) -> list[LogEntry]:
    """Return the entries that a consumer has not committed yet, in log order."""
    return after_positions(conn, positions(conn, consumer, topics), limit)


def positions(conn: sqlite3.Connection, consumer: str, topics: Sequence[str] | None) -> dict[str, int]:
    """Return the offset that a consumer has committed, by topic."""
    return {topic: _position(conn, consumer, topic) for topic in _names(topics)}


def after_positions(conn: sqlite3.Connection, positions: Mapping[str, int], limit: int) -> list[LogEntry]:
    """Return the entries after the given position of each topic, in log order."""
    return _merge([_entries(conn, topic, offset, limit) for topic, offset in positions.items()], limit)


def commit(conn: sqlite3.Connection, consumer: str, offset: int, topics: Sequence[str] | None) -> None:
    """Move a consumer's position forward. A position never moves back."""
    wanted = None if topics is None else json.dumps(list(topics))
    with transaction(conn):
        conn.execute(_COMMIT, {"consumer": consumer, "offset": offset, "topics": wanted})


def topics(conn: sqlite3.Connection) -> list[str]:
    """List the topics that have entries."""
    return [topic for (topic,) in conn.execute(_TOPICS)]


def _names(chosen: Sequence[str] | None) -> list[str]:
    return [WHOLE_LOG] if chosen is None else sorted(set(chosen))


def _position(conn: sqlite3.Connection, consumer: str, topic: str) -> int:
    """Return a consumer's position in a topic. The first read stores a position, because a commit needs the topics."""
    names = {"consumer": consumer, "topic": topic}
    if (found := conn.execute(_POSITION, names).fetchone()) is None:
        with transaction(conn):
            conn.execute(_SUBSCRIBE, names)
        return 0
    return int(found[0])


def _entries(conn: sqlite3.Connection, topic: str, offset: int, limit: int) -> list[LogEntry]:
    query = _FROM_ALL if topic == WHOLE_LOG else _FROM_TOPIC
    return [_entry(row) for row in conn.execute(query, {"topic": topic, "after": offset, "limit": limit})]


def _merge(runs: Sequence[list[LogEntry]], limit: int) -> list[LogEntry]:
    return list(heapq.merge(*runs, key=lambda entry: entry.offset))[:limit]


def _entry(row: Sequence[Any]) -> LogEntry:
    offset, topic, key, message_id, routing_key, headers, body, published_at = row
    message = Message(message_id, topic, key, routing_key, bytes(body), json.loads(headers))
    return LogEntry(offset, message, datetime.fromtimestamp(published_at, UTC))
