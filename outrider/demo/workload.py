"""A small shop: orders are written and events staged in one transaction; some transactions roll back.

Every attempt is noted in a table of its own beforehand, so that what was rolled back can be counted afterwards.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import outrider
from outrider import Event
from outrider.demo.places import Places

ROLLBACK_SHARE = 0.1
BURST = 100
BURST_SECONDS = 0.3
"""Orders come in bursts, so that events flow, and relays can be killed, over the whole run."""

_TABLES = (
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, event_id TEXT NOT NULL UNIQUE)",
    "CREATE TABLE attempts (id INTEGER PRIMARY KEY, customer TEXT NOT NULL)",
)


class Attempt(NamedTuple):
    """One order that a customer tries to place."""

    id: int
    customer: str
    fails: bool


def attempts(orders: int, keys: int, chance: random.Random) -> Iterator[Attempt]:
    """Yield attempts until that many orders have not failed.

    >>> sum(not attempt.fails for attempt in attempts(50, 3, random.Random(1)))
    50
    """
    number = 0
    while orders:
        number += 1
        fails = chance.random() < ROLLBACK_SHARE
        orders -= not fails
        yield Attempt(number, f"customer-{chance.randrange(keys)}", fails)


def prepare(path: Path) -> None:
    """Make the shop's own tables, in the database that holds the outbox."""
    with closing(_connect(path)) as conn:
        for statement in _TABLES:
            conn.execute(statement)


@dataclass(slots=True)
class Writer:
    """Places the orders, in a thread."""

    places: Places
    orders: int
    keys: int
    stopping: threading.Event
    seed: int = 1

    def run(self) -> None:
        """Write burst after burst until all is written or the wish to stop comes."""
        todo = list(attempts(self.orders, self.keys, random.Random(self.seed)))
        with closing(_connect(self.places.shop)) as conn:
            for start in range(0, len(todo), BURST):
                if self.stopping.is_set():
                    return
                self._burst(conn, todo[start : start + BURST])
                self.stopping.wait(BURST_SECONDS)

    def _burst(self, conn: sqlite3.Connection, burst: list[Attempt]) -> None:
        conn.execute("BEGIN IMMEDIATE")
        conn.executemany("INSERT INTO attempts (id, customer) VALUES (?, ?)", [attempt[:2] for attempt in burst])
        conn.execute("COMMIT")
        for attempt in burst:
            if self.stopping.is_set():
                return
            place(conn, attempt)


def place(conn: sqlite3.Connection, attempt: Attempt) -> None:
    """Write an order and stage its event together; then commit, or change our mind."""
    conn.execute("BEGIN IMMEDIATE")
    event = Event("order.placed", {"order": attempt.id}, key=attempt.customer, sequence="auto")
    (event_id,) = outrider.stage_sync(conn, event)
    row = (attempt.id, attempt.customer, str(event_id))
    conn.execute("INSERT INTO orders (id, customer, event_id) VALUES (?, ?, ?)", row)
    conn.execute("ROLLBACK" if attempt.fails else "COMMIT")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=30, isolation_level=None)
