"""The consumer of the demo: bills each order once, in a database of its own.

It is run as `outrider consume outrider.demo.billing:inbox`. No constraint keeps an event from having two effects, so
that only the inbox does.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from outrider import Event, Inbox

CONSUMER = "billing"
BATCH_MAX = 20
"""Events in one transaction: small, so that many transactions are there to be killed in."""

_TABLE = """CREATE TABLE effects (
    id INTEGER PRIMARY KEY, event_id TEXT NOT NULL, key TEXT NOT NULL, sequence INTEGER NOT NULL
)"""
_INSERT = "INSERT INTO effects (event_id, key, sequence) VALUES (?, ?, ?)"

inbox = Inbox()
inbox.consumer(CONSUMER, batch_max=BATCH_MAX)


@inbox.handler("order.placed", consumer=CONSUMER)
def bill(event: Event, tx: sqlite3.Connection) -> None:
    """Write one effect, in the transaction of the receipt."""
    tx.execute(_INSERT, (str(event.event_id), event.key, event.sequence))


def prepare(path: Path) -> None:
    """Make the table of effects, in the database that holds the inbox."""
    with closing(sqlite3.connect(path)) as conn:
        conn.execute(_TABLE)
