"""What people do to events: replay, discard and bury, each in one transaction with its record."""

from __future__ import annotations

import json
from collections import Counter as Count
from collections.abc import Iterable, Sequence
from datetime import datetime
from uuid import UUID

from outrider import lifecycle
from outrider.errors import Transient
from outrider.event import Stream, default_topic
from outrider.lifecycle import State
from outrider.outcome import Bury, Policy
from outrider.store import Cause
from outrider.stores.mongo import ownership, settling, streams
from outrider.stores.mongo.counters import Counter, Wanted, advance, time_position
from outrider.stores.mongo.database import Database, Document, Session
from outrider.stores.mongo.documents import becoming, copied, placed, stream_id
from outrider.stores.mongo.filling import FILL_MAX, fill
from outrider.stores.mongo.markers import marker_of
from outrider.stores.mongo.steps import arun

BURIABLE = sorted(set(lifecycle.guard("bury")) - {State.OPTIMISTIC})


async def replay(session: Session, database: Database, event_ids: Sequence[UUID], actor: str, lanes: int) -> int:
    """Put held dead letters back in their place, and stage skipped ones anew, marked as late."""
    dead = await _chosen(session, database, event_ids)
    now = await database.time(session)
    held = [row for row in dead if row["policy"] == Policy.HOLD]
    back = [{**copied(row), "attempts": 0, **becoming(State.PARKED, row["lane"])["$set"]} for row in held]
    late = [row for row in dead if row["policy"] == Policy.SKIP]
    await _insert(session, database, back + await _staged_again(session, database, late, now, lanes))
    await _remove(session, database, dead, held, now)
    await _record(session, database, "replay", actor, dead, now=now)
    return len(dead)


async def discard(session: Session, database: Database, event_ids: Sequence[UUID], actor: str) -> int:
    """Give dead letters up. A held one that was numbered leaves a marker in its place."""
    dead = await _chosen(session, database, event_ids)
    now = await database.time(session)
    held = [row for row in dead if row["policy"] == Policy.HOLD]
    await _insert(session, database, [marker for row in held if (marker := marker_of(row, State.PARKED))])
    await _remove(session, database, dead, held, now)
    await _record(session, database, "discard", actor, dead, now=now)
    return len(dead)


async def bury(session: Session, database: Database, event_id: UUID, outcome: Bury, *, actor: str, lanes: int) -> bool:
    """Move an undelivered event to the dead letters, unless it has left or is in the hands of a writer."""
    while await fill(session, database, lanes) == FILL_MAX:
        pass
    row = await database["outbox"].find_one({"_id": event_id, "state": {"$in": BURIABLE}}, session=session)
    if row is None:
        return False
    stream = Stream(row["lane"], _topic(row), row["stream_key"])
    now = await database.time(session)
    await ownership.take_lanes(session, database, [stream.lane])
    await _park_before(session, database, row["position"], stream)
    block = await settling.bury(session, database, copied(row), stream, outcome, now)
    await streams.write(session, database, {stream: block}, (), now)
    await _record(session, database, "bury", actor, [row], now=now)
    return True


async def _park_before(session: Session, database: Database, position: int, stream: Stream) -> None:
    """Let earlier events of the stream wait too, or what takes the buried one's place would go out before them."""
    earlier = {"fetchable": stream.lane, "position": {"$lt": position}, "stream_key": stream.key}
    rows = await database["outbox"].find(earlier, session=session).to_list()
    mine = [row for row in rows if _topic(row) == stream.topic]
    if any(row["state"] == State.OPTIMISTIC for row in mine):
        raise Transient("an earlier event of its stream is being sent by its writer; try again in a few seconds")
    if mine:
        change = becoming(State.PARKED, stream.lane, topic=stream.topic)
        await database["outbox"].update_many({"_id": {"$in": [row["_id"] for row in mine]}}, change, session=session)


async def _chosen(session: Session, database: Database, event_ids: Sequence[UUID]) -> list[Document]:
    """Return those of the ids that are dead letters, in the order they are replayed."""
    found = database["outbox_dead_letter"].find({"_id": {"$in": list(event_ids)}}, session=session)
    return await found.sort([("position", 1), ("buried_at", 1), ("_id", 1)]).to_list()


async def _staged_again(
    session: Session, database: Database, rows: Sequence[Document], now: datetime, lanes: int
) -> list[Document]:
    """Return dead letters as late deliveries, behind everything that their streams hold by now."""
    counters = [_counter(row, lanes) for row in rows]
    left = Count(counter for counter in counters if counter)
    wanted = {counter: Wanted(count, 0) for counter, count in left.items()}
    last = await arun(advance(wanted, database.now), session, database.schema)
    staged = []
    for row, counter in zip(rows, counters, strict=True):
        position = time_position(now)
        if counter:
            left[counter] -= 1
            position = last[counter].position - left[counter]
        headers = json.dumps({**json.loads(row["headers"]), "replayed": "true"}, ensure_ascii=False)
        staged.append({**copied(row), "attempts": 0, "headers": headers, **placed(row["lane"], position)})
    return staged


def _counter(row: Document, lanes: int) -> Counter | None:
    alone = row["stream_key"] == str(row["_id"])
    return None if alone else Counter(row["topic"], row["stream_key"], row["lane"] // lanes)


async def _insert(session: Session, database: Database, rows: Sequence[Document]) -> None:
    if rows:
        await database["outbox"].insert_many(rows, session=session)


async def _remove(
    session: Session, database: Database, dead: Sequence[Document], held: Iterable[Document], now: datetime
) -> None:
    """Take dead letters away. A held stream goes on once none of its dead letters is held; outbox_dead_letter_held."""
    letters, blocked = database["outbox_dead_letter"], database["outbox_blocked"]
    await letters.delete_many({"_id": {"$in": [row["_id"] for row in dead]}}, session=session)
    for stream in {Stream(row["lane"], row["topic"], row["stream_key"]) for row in held}:
        mine = {"_id": stream_id(stream), "cause": Cause.HELD.value}
        # Of two people who take its last two dead letters, each would see that of the other: one has to begin anew.
        await blocked.update_one(mine, {"$inc": {"turn": 1}}, session=session)
        rest = {"lane": stream.lane, "topic": stream.topic, "stream_key": stream.key, "policy": Policy.HOLD.value}
        if await letters.find_one(rest, {"_id": 1}, session=session) is None:
            drain = {"$set": {"cause": Cause.DRAINING.value, "head": None, "until": now}}
            await blocked.update_one(mine, drain, session=session)


async def _record(
    session: Session, database: Database, verb: str, actor: str, rows: Sequence[Document], *, now: datetime
) -> None:
    """Write down what a person did."""
    if rows:
        done = [{"at": now, "actor": actor, "verb": verb, "event_id": row["_id"]} for row in rows]
        await database["outbox_operation"].insert_many(done, session=session)


def _topic(row: Document) -> str:
    return default_topic(row["event_type"], row.get("topic"), row.get("routing_key"))
