"""Counts the results of the demo from the shop's tables, the log and the consumer's effects."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.brokers.embedded import EmbeddedBroker
from outrider.demo.shop import DemoFiles

AUDITOR = "auditor"
READ_MAX = 5000


class ReceivedEntry(NamedTuple):
    """An entry of the log or an effect of the consumer, in the order of arrival."""

    event_id: str
    key: str
    sequence: int


class Kills(NamedTuple):
    """The number of killed relays and consumers."""

    relays: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The counts of the demo, named as in the JSON output."""

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
        """Tell whether the guarantees were kept."""
        return self.lost == self.phantom == self.reordered == self.double_effects == 0

    def is_passed(self, kills: Kills) -> bool:
        """Tell whether the guarantees were kept under the planned number of kills."""
        return self.kept and (self.kills, self.consumer_kills) == kills


def first_deliveries(entries: Sequence[ReceivedEntry]) -> list[ReceivedEntry]:
    """Return the first entry of every event."""
    first: dict[str, ReceivedEntry] = {}
    for entry in entries:
        first.setdefault(entry.event_id, entry)
    return list(first.values())


def count_reordered(entries: Sequence[ReceivedEntry]) -> int:
    """Count first deliveries behind a later event of the same key.

    >>> count_reordered([ReceivedEntry(name, "k", number) for name, number in [("a", 1), ("c", 3), ("b", 2), ("a", 1)]])
    1
    """
    highest: dict[str, int] = {}
    reordered = 0
    for entry in first_deliveries(entries):
        reordered += entry.sequence < highest.get(entry.key, entry.sequence)
        highest[entry.key] = max(entry.sequence, highest.get(entry.key, entry.sequence))
    return reordered


def count(
    committed: Collection[str],
    attempted: int,
    entries: Sequence[ReceivedEntry],
    effects: Sequence[ReceivedEntry],
    kills: Kills,
) -> Summary:
    """Compare committed events with log and effects. A delivered event is in the log and has its effect."""
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


async def verify(files: DemoFiles, kills: Kills) -> Summary:
    """Read tables, log and effects, and count."""
    committed = [str(event_id) for (event_id,) in _rows(files.shop, "SELECT event_id FROM orders")]
    ((attempted,),) = _rows(files.shop, "SELECT count(*) FROM attempts")
    effects = [
        ReceivedEntry(*row) for row in _rows(files.received, "SELECT event_id, key, sequence FROM effects ORDER BY id")
    ]
    return count(committed, attempted, await read_log(files.log), effects, kills)


async def read_log(path: Path) -> list[ReceivedEntry]:
    """Read the whole log as a separate consumer."""
    log, entries = EmbeddedBroker(path), list[ReceivedEntry]()
    try:
        while batch := await log.read(AUDITOR, None, READ_MAX):
            messages = [entry.message for entry in batch]
            entries += [ReceivedEntry(each.message_id, each.key, int(each.headers["sequence"])) for each in messages]
            await log.commit(AUDITOR, batch[-1].offset)
    finally:
        await log.close()
    return entries


def _rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as conn:
        return conn.execute(query).fetchall()
