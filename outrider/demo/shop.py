"""A small shop: orders are written and events staged in one transaction; some transactions roll back.

A separate table records every attempt beforehand, so rolled back transactions can be counted afterwards.
"""

from __future__ import annotations

import random
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import outrider
from outrider import Event, Inbox
from outrider.errors import UsageError

ROLLBACK_SHARE = 0.1

BURST = 100

BURST_SECONDS = 0.3
"""The pause between bursts: events flow, and relays are killed, during the whole run."""

_TABLES = (
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, event_id TEXT NOT NULL UNIQUE)",
    "CREATE TABLE attempts (id INTEGER PRIMARY KEY, customer TEXT NOT NULL)",
)

CONSUMER = "billing"

BATCH_MAX = 20
"""Events per transaction: few, so that kills meet many open transactions."""

_TABLE = """CREATE TABLE effects (
    id INTEGER PRIMARY KEY, event_id TEXT NOT NULL, key TEXT NOT NULL, sequence INTEGER NOT NULL
)"""

_INSERT = "INSERT INTO effects (event_id, key, sequence) VALUES (?, ?, ?)"

inbox = Inbox()


class Attempt(NamedTuple):
    """An order that a customer tries to place."""

    id: int
    customer: str
    fails: bool


def attempts(orders: int, keys: int, rng: random.Random) -> Iterator[Attempt]:
    """Yield attempts until the given number of orders succeeds.

    >>> sum(not attempt.fails for attempt in attempts(50, 3, random.Random(1)))
    50
    """
    number = 0
    while orders:
        number += 1
        fails = rng.random() < ROLLBACK_SHARE
        orders -= not fails
        yield Attempt(number, f"customer-{rng.randrange(keys)}", fails)


def prepare_shop(path: Path) -> None:
    """Make the shop's own tables, in the database that holds the outbox."""
    with closing(_connect(path)) as conn:
        for statement in _TABLES:
            conn.execute(statement)


@dataclass(slots=True)
class Writer:
    """Places the orders, in a thread."""

    files: DemoFiles
    orders: int
    keys: int
    stopping: threading.Event
    seed: int = 1

    def run(self) -> None:
        """Write bursts of orders until all are written or `stopping` is set."""
        todo = list(attempts(self.orders, self.keys, random.Random(self.seed)))
        with closing(_connect(self.files.shop)) as conn:
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
            place_order(conn, attempt)


def place_order(conn: sqlite3.Connection, attempt: Attempt) -> None:
    """Write an order and stage its event in one transaction; then commit or roll back."""
    conn.execute("BEGIN IMMEDIATE")
    event = Event("order.placed", {"order": attempt.id}, key=attempt.customer, sequence="auto")
    (event_id,) = outrider.stage_sync(conn, event)
    row = (attempt.id, attempt.customer, str(event_id))
    conn.execute("INSERT INTO orders (id, customer, event_id) VALUES (?, ?, ?)", row)
    conn.execute("ROLLBACK" if attempt.fails else "COMMIT")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=30, isolation_level=None)


inbox.consumer(CONSUMER, batch_max=BATCH_MAX)


@inbox.handler("order.placed", consumer=CONSUMER)
def bill(event: Event, tx: sqlite3.Connection) -> None:
    """Write an effect in the transaction of the receipt."""
    tx.execute(_INSERT, (str(event.event_id), event.key, event.sequence))


def prepare_billing(path: Path) -> None:
    """Make the table of effects, in the database that holds the inbox."""
    with closing(sqlite3.connect(path)) as conn:
        conn.execute(_TABLE)


@dataclass(frozen=True, slots=True)
class DemoFiles:
    """The files of one run.

    >>> DemoFiles(Path("demo")).store_url
    'sqlite:///demo/shop.db'
    """

    directory: Path

    @property
    def shop(self) -> Path:
        """Return the shop's database: orders and outbox share transactions."""
        return self.directory / "shop.db"

    @property
    def log(self) -> Path:
        """Return the embedded broker's log."""
        return self.directory / "log.db"

    @property
    def received(self) -> Path:
        """Return the consumer's own database: effects and inbox together."""
        return self.directory / "received.db"

    @property
    def store_url(self) -> str:
        """Return the URL of the outbox."""
        return f"sqlite:///{self.shop}"

    @property
    def inbox_url(self) -> str:
        """Return the URL of the inbox."""
        return f"sqlite:///{self.received}"

    @property
    def broker_url(self) -> str:
        """Return the URL of the log."""
        return f"embedded:///{self.log}"


@contextmanager
def demo_files(directory: Path | None) -> Iterator[DemoFiles]:
    """Open a temporary directory, or the given directory, which stays."""
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="outrider-demo-", ignore_cleanup_errors=True) as made:
            yield DemoFiles(Path(made))
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory} cannot be made ({error.strerror}); name another directory with --dir") from error
    chosen = DemoFiles(directory)
    if taken := [path.name for path in (chosen.shop, chosen.log, chosen.received) if path.exists()]:
        raise UsageError(f"{directory} holds {', '.join(taken)} of another run; name an empty directory with --dir")
    yield chosen
