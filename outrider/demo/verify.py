"""Counting, afterwards and from the outside: the shop's tables, the log, and the effects of the consumer."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.brokers.embedded import EmbeddedBroker
from outrider.demo.places import Places

AUDITOR = "auditor"
READ_MAX = 5000


class Entry(NamedTuple):
    """One entry of the log, or one effect of the consumer; they are listed in the order in which they came."""

    event_id: str
    key: str
    sequence: int


class Kills(NamedTuple):
    """How many were killed."""

    relays: int
    consumers: int


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
    double_effects: int
    kills: int
    consumer_kills: int

    @property
    def kept(self) -> bool:
        """Tell whether the promise was kept."""
        return self.lost == self.phantom == self.reordered == self.double_effects == 0

    def holds(self, kills: Kills) -> bool:
        """Tell whether the promise was kept, and put to the test as often as planned."""
        return self.kept and (self.kills, self.consumer_kills) == kills


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
    committed: Collection[str], attempted: int, entries: Sequence[Entry], effects: Sequence[Entry], kills: Kills
) -> Summary:
    """Compare what was committed with what came of it. Delivered means in the log, and with its effect."""
    wanted = set(committed)
    logged, effected = ({each.event_id for each in found} for found in (entries, effects))
    return Summary(
        committed=len(wanted),
        rolled_back=attempted - len(wanted),
        delivered=len(logged & effected),
        lost=len(wanted - (logged & effected)),
        phantom=len((logged | effected) - wanted),
        reordered=count_reordered(entries) + count_reordered(effects),
        duplicates=len(entries) - len(logged),
        double_effects=len(effects) - len(effected),
        kills=kills.relays,
        consumer_kills=kills.consumers,
    )


async def verify(places: Places, kills: Kills) -> Summary:
    """Read everything anew and count."""
    committed = [str(event_id) for (event_id,) in _rows(places.shop, "SELECT event_id FROM orders")]
    ((attempted,),) = _rows(places.shop, "SELECT count(*) FROM attempts")
    effects = [Entry(*row) for row in _rows(places.received, "SELECT event_id, key, sequence FROM effects ORDER BY id")]
    return count(committed, attempted, await read_log(places.log), effects, kills)


async def read_log(path: Path) -> list[Entry]:
    """Read the whole log, as a consumer of its own."""
    log, entries = EmbeddedBroker(path), list[Entry]()
    try:
        while batch := await log.read(AUDITOR, None, READ_MAX):
            messages = [entry.message for entry in batch]
            entries += [Entry(each.message_id, each.key, int(each.headers["sequence"])) for each in messages]
            await log.commit(AUDITOR, batch[-1].offset)
    finally:
        await log.close()
    return entries


def _rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as conn:
        return conn.execute(query).fetchall()
