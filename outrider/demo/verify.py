"""Counting, afterwards and from the outside: the shop's tables, the log, and what the consumer wrote down."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outrider.brokers.embedded import EmbeddedBroker
from outrider.demo.places import Places

AUDITOR = "auditor"
READ_MAX = 5000


class Entry(NamedTuple):
    """One entry of the log, in the order of the log."""

    event_id: str
    key: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What the demo is about. The names are those of the JSON output."""

    committed: int
    rolled_back: int
    delivered: int
    lost: int
    phantom: int
    reordered: int
    duplicates: int
    kills: int

    def holds(self, kills: int) -> bool:
        """Tell whether the promise was kept, and put to the test as often as planned."""
        return self.lost == self.phantom == self.reordered == 0 and self.kills == kills


def first_deliveries(entries: Sequence[Entry]) -> list[Entry]:
    """Return each event's first entry."""
    first: dict[str, Entry] = {}
    for entry in entries:
        first.setdefault(entry.event_id, entry)
    return list(first.values())


def count_reordered(entries: Sequence[Entry]) -> int:
    """Count first deliveries that came after a later one of their key.

    >>> count_reordered([Entry("a", "k", 1), Entry("c", "k", 3), Entry("b", "k", 2), Entry("a", "k", 1)])
    1
    """
    highest: dict[str, int] = {}
    reordered = 0
    for entry in first_deliveries(entries):
        reordered += entry.sequence < highest.get(entry.key, entry.sequence)
        highest[entry.key] = max(entry.sequence, highest.get(entry.key, entry.sequence))
    return reordered


def count(
    committed: Collection[str], attempted: int, entries: Sequence[Entry], received: Collection[str], kills: int
) -> Summary:
    """Compare what was committed with what arrived. Delivered means in the log and taken by the consumer."""
    logged = {entry.event_id for entry in entries}
    wanted = set(committed)
    arrived = logged & set(received)
    return Summary(
        committed=len(wanted),
        rolled_back=attempted - len(wanted),
        delivered=len(arrived),
        lost=len(wanted - arrived),
        phantom=len(logged - wanted),
        reordered=count_reordered(entries),
        duplicates=len(entries) - len(logged),
        kills=kills,
    )


async def verify(places: Places, kills: int) -> Summary:
    """Read everything anew and count."""
    committed = [str(event_id) for (event_id,) in _rows(places.shop, "SELECT event_id FROM orders")]
    ((attempted,),) = _rows(places.shop, "SELECT count(*) FROM attempts")
    received = [str(event_id) for (event_id,) in _rows(places.received, "SELECT event_id FROM received")]
    return count(committed, int(str(attempted)), await read_log(places.log), received, kills)


async def read_log(path: Path) -> list[Entry]:
    """Read the whole log, as a consumer of its own."""
    log, entries = EmbeddedBroker(path), list[Entry]()
    try:
        while batch := await log.read(AUDITOR, None, READ_MAX):
            messages = [delivery.message for delivery in batch]
            entries += [Entry(each.message_id, each.key, int(each.headers["sequence"])) for each in messages]
            await log.commit(AUDITOR, batch[-1].offset)
    finally:
        await log.close()
    return entries


def _rows(path: Path, query: str) -> list[tuple[object, ...]]:
    if not path.exists():
        return []
    with closing(sqlite3.connect(path)) as conn:
        return conn.execute(query).fetchall()
