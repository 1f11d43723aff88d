"""Documents from elsewhere get their lane, their position, and whatever their writer has left out.

The server cannot check that a text is JSON. One that is not would stop its lane for ever, so it goes to the dead
letters here, with its payload as a JSON string, before any relay can meet it.
"""

from __future__ import annotations

import json
from collections import Counter as Count
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pymongo import ReplaceOne, UpdateOne

from outrider.event import Priority, band_of, default_topic, lane_of
from outrider.outcome import Policy, Reason
from outrider.stores.mongo.counters import Counter, Last, Wanted, advance, time_position
from outrider.stores.mongo.database import Database, Document, Session
from outrider.stores.mongo.documents import UNMET, copied, placed
from outrider.stores.mongo.steps import arun

FILL_MAX = 500
"""How many documents from elsewhere are filled in one transaction."""

KEPT_MAX = 2_000_000
"""Characters kept of what is not JSON: as a JSON string each may take six bytes, and all must fit into a document."""

_DEFAULTS: Document = {"headers": "{}", "priority": int(Priority.NORMAL), "schema_version": 1, "attempts": 0}


async def fill(session: Session, database: Database, lanes: int) -> int:
    """Fill in documents that have no lane, as they came; return how many there were, at most FILL_MAX."""
    found = database["outbox"].find(UNMET, session=session).hint("outbox_position").limit(FILL_MAX)
    rows = await found.to_list()
    if not rows:
        return 0
    now = await database.time(session)
    bad = {row["_id"]: trouble for row in rows if (trouble := unreadable(row))}
    good = [{**_DEFAULTS, "created_at": now, **_said(row)} for row in rows if row["_id"] not in bad]
    last = await arun(advance(_wanted(good), database.now), session, database.schema)
    if changes := _changes(good, last, now, lanes):
        await database["outbox"].bulk_write(changes, session=session)
    if bad:
        dead = [
            _dead({**_DEFAULTS, "created_at": now, **_said(row)}, bad[row["_id"]], now, lanes)
            for row in rows
            if row["_id"] in bad
        ]
        # A writer may have used the id of an earlier dead letter again.
        replaced = [ReplaceOne({"_id": letter["_id"]}, letter, upsert=True) for letter in dead]
        await database["outbox_dead_letter"].bulk_write(replaced, session=session)
        await database["outbox"].delete_many({"_id": {"$in": list(bad)}}, session=session)
    return len(rows)


def unreadable(row: Mapping[str, Any]) -> str | None:
    """Say what of a document from elsewhere cannot be read; None if all can.

    >>> unreadable({"payload": "{}", "headers": "[]"})
    'headers: not a JSON object'
    """
    for name in ("payload", "headers", "retry"):
        try:
            value = None if row.get(name) is None else json.loads(row[name])
        except (ValueError, RecursionError) as error:
            return f"{name}: not JSON ({error})"
        if name != "payload" and not isinstance(value, dict | None):
            return f"{name}: not a JSON object"
    return None


def _said(row: Mapping[str, Any]) -> Document:
    """Return what the writer has said, with the key of its stream."""
    said = {name: value for name, value in row.items() if value is not None}
    said["stream_key"] = row.get("key") or row.get("aggregate_id") or str(row["_id"])
    return said


def _counter(row: Mapping[str, Any]) -> Counter | None:
    if row["stream_key"] == str(row["_id"]):
        return None
    topic = default_topic(row["event_type"], row.get("topic"), row.get("routing_key"))
    return Counter(topic, row["stream_key"], band_of(row["priority"]))


def _wanted(rows: Sequence[Document]) -> dict[Counter, Wanted]:
    counts = Count(counter for row in rows if (counter := _counter(row)))
    return {counter: Wanted(count, 0) for counter, count in counts.items()}


def _changes(rows: Sequence[Document], last: dict[Counter, Last], now: datetime, lanes: int) -> list[UpdateOne]:
    left = {counter: wanted.positions for counter, wanted in _wanted(rows).items()}
    changes = []
    for row in rows:
        position = time_position(now)
        if counter := _counter(row):
            left[counter] -= 1
            position = last[counter].position - left[counter]
        lane = lane_of(row["stream_key"], row["priority"], lanes)
        given = {name: row[name] for name in (*_DEFAULTS, "created_at", "stream_key")}
        change = {
            "$set": {**given, **placed(lane, position)},
            "$unset": {"waiting": "", "held_by": "", "held_until": ""},
        }
        changes.append(UpdateOne({"_id": row["_id"]}, change))
    return changes


def _dead(row: Document, trouble: str, now: datetime, lanes: int) -> Document:
    """Return the dead letter of a document that cannot be read: nothing waits for it, and it can be looked at."""
    kept = {**copied(row, but=("retry",)), "payload": _text(row["payload"]), "headers": "{}"}
    place = {"lane": lane_of(row["stream_key"], row["priority"], lanes), "position": time_position(now)}
    verdict = {"reason": Reason.SCHEMA_VALIDATION_FAILED.value, "policy": Policy.SKIP.value, "buried_at": now}
    topic = default_topic(row["event_type"], row.get("topic"), row.get("routing_key"))
    failure = json.dumps({"kind": "unreadable", "error": trouble})
    return {**kept, **place, **verdict, "topic": topic, "failure": failure}


def _text(payload: str) -> str:
    return json.dumps(payload[:KEPT_MAX], ensure_ascii=False)
