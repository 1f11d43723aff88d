"""Positions and numbers come from one document per stream.

Two open transactions that place events in one stream both write that document, so one of them is refused and starts
anew: the order of positions is the order of commits. A position is also roughly the time, in microseconds, so that
streams which share a lane take turns. So a document that only places can be forgotten after a while: the next one
begins at a later time. One that numbers stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from pymongo import ReturnDocument, UpdateOne

from outrider.stores.mongo.steps import Steps, step

COLLECTION = "outbox_counter"


class Counter(NamedTuple):
    """What is counted: a topic, a key and a band. Sorting them gives the order in which they are locked."""

    topic: str
    key: str
    band: int


class Wanted(NamedTuple):
    """How many positions, and how many numbers, a stream needs."""

    positions: int
    numbers: int


class Last(NamedTuple):
    """The last position and the last number of a stream; those that were asked for end there."""

    position: int
    sequence: int


def advance(wanted: Mapping[Counter, Wanted], now: Any) -> Steps[dict[Counter, Last]]:
    """Take positions and numbers. The documents are the transaction's own from here on."""
    if not wanted:
        return {}
    if len(wanted) == 1:
        [(counter, need)] = wanted.items()
        options = {"upsert": True, "return_document": ReturnDocument.AFTER}
        row = yield step(COLLECTION, "find_one_and_update", _place(counter), _change(need, now), **options)
        return {counter: _last(row)}
    changes = [UpdateOne(_place(counter), _change(need, now), upsert=True) for counter, need in sorted(wanted.items())]
    yield step(COLLECTION, "bulk_write", changes)
    rows = yield step(COLLECTION, "find", {"_id": {"$in": [counter._asdict() for counter in wanted]}})
    return {Counter(**row["_id"]): _last(row) for row in rows}


def time_position(now: datetime) -> int:
    """Return the position of an event that is alone in its stream.

    >>> from datetime import UTC
    >>> time_position(datetime(1970, 1, 1, second=1, tzinfo=UTC))
    1000000
    """
    return int(now.timestamp() * 1_000_000)


def _place(counter: Counter) -> dict[str, Any]:
    return {"_id": counter._asdict()}


def _change(need: Wanted, now: Any) -> list[dict[str, Any]]:
    counted = {"$add": [{"$ifNull": ["$position", 0]}, need.positions]}
    position = {"$max": [counted, {"$multiply": [{"$toLong": now}, 1000]}]}
    if need.numbers:
        sequence = {"$add": [{"$ifNull": ["$sequence", {"$toLong": 0}]}, need.numbers]}
        return [{"$set": {"position": position, "sequence": sequence, "used": "$$REMOVE"}}]
    # The day, not the moment, so that the index of it is hardly ever written; never an earlier one than before.
    used = {"$max": ["$used", {"$dateTrunc": {"date": now, "unit": "day"}}]}
    return [{"$set": {"position": position, "used": {"$cond": [{"$gt": ["$sequence", None]}, "$$REMOVE", used]}}}]


def _last(row: Mapping[str, Any]) -> Last:
    return Last(row["position"], row.get("sequence", 0))
