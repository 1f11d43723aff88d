"""Admin operations and maintenance of the outbox in MongoDB."""

from __future__ import annotations

import json
from collections import Counter
from collections import Counter as Count
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pymongo.read_concern import ReadConcern

from outrider.errors import NotFound, Transient, UsageError
from outrider.event import DeadLetterReason, OnDeadLetter, Stream, TopicRule, topic_of
from outrider.outbox import model
from outrider.outbox.model import (
    EXPIRE_ACTOR,
    EXPIRE_VERB,
    BlockedStream,
    BlockReason,
    Criteria,
    DeadLettered,
    DeadLetterEdit,
    DeadRelay,
    JournalKind,
    Pruned,
    Retention,
    State,
)
from outrider.stores.mongo import journal, outbox_lanes, outbox_settle
from outrider.stores.mongo.database import Document, Documents, MongoDatabase, Session, is_unauthorized, translated
from outrider.stores.mongo.documents import UNMET, becoming, copied, inserted, stream_id, to_facts, to_stream
from outrider.stores.mongo.operation_log import MongoOperationLog, record
from outrider.stores.mongo.operations import run_operations_async
from outrider.stores.mongo.outbox_fetch import FILL_MAX, fill, of_stream
from outrider.stores.mongo.outbox_lanes import living, living_relays
from outrider.stores.mongo.outbox_settle import skip_marker
from outrider.stores.mongo.staging import SequenceCounter, Wanted, advance, time_position

if TYPE_CHECKING:
    from outrider.stores.mongo.outbox import MongoStore

LOOK_MAX = 10_000
"""The maximum of events, and of blocked streams, that are read to list topics."""

_TABLES = {"outbox": None, "outbox_archive": State.SENT.value, "outbox_dead_letter": State.DEAD_LETTER.value}

DEAD_LETTERABLE = sorted(set(model.guard("dead_letter")) - {State.OPTIMISTIC})

PRUNE_MAX = 1_000
"""The maximum of documents removed in one step."""

COUNTER_DAYS = 2.0
"""The idle time in whole days after which the counter of an unnumbered stream is deleted."""

MEND_MAX = 100
"""The maximum of streams repaired in one step; the next maintenance repairs the rest."""

Pipeline = list[dict[str, Any]]


async def dead_letter(
    session: Session, store: MongoStore, event_id: UUID, outcome: DeadLettered, *, actor: str
) -> bool:
    """Move an undelivered event to the dead letters, unless the event has left or a writer has claimed it."""
    database, rule = store.database, store.topic_rule
    while await fill(session, database, store.lanes, rule) == FILL_MAX:
        pass
    row = await database["outbox"].find_one({"_id": event_id, "state": {"$in": DEAD_LETTERABLE}}, session=session)
    if row is None:
        return False
    stream = Stream(row["lane"], _topic(row, rule), row["stream_key"])
    now, journaled = await journal.read_switch(session, database)
    await outbox_lanes.claim_lanes(session, database, [stream.lane])
    await _park_before(session, database, row["position"], stream, rule)
    block = await outbox_settle.dead_letter(session, database, copied(row), stream, outcome, now, journaled=journaled)
    await outbox_settle.write(session, database, {stream: block}, (), now)
    await _record(session, database, "dead_letter", actor, [row], policy=str(outcome.policy))
    return True


async def discard(session: Session, database: MongoDatabase, event_ids: Sequence[UUID], actor: str) -> int:
    """Discard dead letters. A blocking dead letter with a sequence number leaves a marker in its position."""
    dead = await _chosen(session, database, event_ids)
    now = await database.time(session)
    blocked = [row for row in dead if row["policy"] == OnDeadLetter.BLOCK]
    await _insert(session, database, [marker for row in blocked if (marker := skip_marker(row, State.PARKED))])
    await _remove(session, database, dead, blocked, now)
    await _record(session, database, "discard", actor, dead)
    await _journal(session, database, JournalKind.DISCARDED, dead)
    return len(dead)


async def _edit(session: Session, database: MongoDatabase, event_id: UUID, edit: DeadLetterEdit, actor: str) -> bool:
    """Change a dead letter. A new topic removes the dead letter from its stream and clears its sequence number."""
    dead_letters = database["outbox_dead_letter"]
    row = await dead_letters.find_one({"_id": event_id}, session=session)
    if row is None:
        return False
    now = await database.time(session)
    moved = edit.topic not in (None, row["topic"])
    change: Document = {"headers": edit.headers_over(row["headers"], moved=moved)}
    change |= {} if edit.payload is None else {"payload": edit.payload}
    if moved:
        blocked = row["policy"] == OnDeadLetter.BLOCK
        marker = skip_marker(row, State.PARKED) if blocked else None
        await _insert(session, database, [marker] if marker else [])
        change |= {"topic": edit.topic, "sequence": None, "policy": OnDeadLetter.SKIP.value}
    await dead_letters.update_one({"_id": event_id}, {"$set": change}, session=session)
    if moved:
        await _unblock(session, database, [row], now)
    await _record(session, database, "edit", actor, [row], **edit.changes(row["payload"], row["topic"]))
    return True


async def replay(session: Session, database: MongoDatabase, event_ids: Sequence[UUID], actor: str, lanes: int) -> int:
    """Return blocking dead letters to their positions; stage skipped dead letters again, marked as late."""
    dead = await _chosen(session, database, event_ids)
    now = await database.time(session)
    blocked = [row for row in dead if row["policy"] == OnDeadLetter.BLOCK]
    restored = [{**copied(row), "attempts": 0, **becoming(State.PARKED, row["lane"])["$set"]} for row in blocked]
    late = [row for row in dead if row["policy"] == OnDeadLetter.SKIP]
    await _insert(session, database, restored + await _staged_again(session, database, late, now, lanes))
    await _remove(session, database, dead, blocked, now)
    await _record(session, database, "replay", actor, dead)
    return len(dead)


class MongoOutboxAdmin:
    """The admin of the outbox: lists, replays, dead-letters and discards events."""

    def __init__(self, store: MongoStore) -> None:
        self._store, self._database, self._lanes = store, store.database, store.lanes

    async def counts(self, *, sent: bool = True) -> dict[str, int]:
        async with self._database.snapshot() as session:
            states = await self._aggregate("outbox", [{"$group": {"_id": "$state", "n": {"$sum": 1}}}], session)
            counts = {State(row["_id"] or State.PENDING).value: 0 for row in states}
            for row in states:
                counts[row["_id"] or State.PENDING.value] += row["n"]
            if sent:
                counts[State.SENT.value] = await self._count("outbox_archive", session)
            counts[State.DEAD_LETTER.value] = await self._count("outbox_dead_letter", session)
        return counts

    async def events(self, criteria: Criteria) -> list[Document]:
        if criteria.reason is not None:
            return []
        if criteria.state == State.SENT:
            return await self._list(
                self._database["outbox_archive"], _wanted(criteria), ("sent_at", -1), criteria.limit
            )
        wanted = _wanted(criteria)
        if criteria.state is not None:
            # A document of a foreign writer has no state until a relay has filled it in.
            unmet = [None] if criteria.state == State.PENDING else []
            wanted["state"] = {"$in": [criteria.state, *unmet]}
        return await self._list(self._database["outbox"], wanted, ("position", 1), criteria.limit)

    async def event(self, event_id: UUID) -> Document:
        with translated(self._database.where):
            for name, state in _TABLES.items():
                if row := await self._database[name].find_one({"_id": event_id}):
                    return to_facts(row, state)
        raise NotFound(f"no event {event_id} in outbox, archive or dead letters; it may have been pruned or deleted")

    async def dead_letters(self, criteria: Criteria) -> list[Document]:
        if criteria.state not in (None, State.DEAD_LETTER):
            return []
        wanted = _wanted(criteria) | ({} if criteria.reason is None else {"reason": criteria.reason})
        return await self._list(self._database["outbox_dead_letter"], wanted, ("position", 1), criteria.limit)

    async def dead_letter_groups(self, criteria: Criteria) -> list[Document]:
        if criteria.state not in (None, State.DEAD_LETTER):
            return []
        wanted = _wanted(criteria) | ({} if criteria.reason is None else {"reason": criteria.reason})
        names = {"reason": "$reason", "topic": "$topic"}
        pipeline: list[dict[str, Any]] = [
            {"$match": wanted},
            {"$group": {"_id": names, "count": {"$sum": 1}}},
            {"$sort": {"count": -1, "_id": 1}},
            {"$limit": criteria.limit},
        ]
        with translated(self._database.where):
            rows = await (await self._database["outbox_dead_letter"].aggregate(pipeline)).to_list()
        return [{**row["_id"], "count": row["count"]} for row in rows]

    async def has_due(self) -> bool:
        events = {"$or": [{"fetchable": {"$exists": True}}, UNMET]}
        due = {"until": {"$type": "date"}, "$expr": {"$lte": ["$until", self._database.now]}}
        with translated(self._database.where):
            for name, wanted in (("outbox", events), ("outbox_blocked", due)):
                if await self._database[name].find_one(wanted, {"_id": 1}):
                    return True
        return False

    async def relays(self) -> int:
        with translated(self._database.where):
            return len(await living_relays(self._database))

    async def lane_owner(self, lane: int) -> str | None:
        with translated(self._database.where):
            row = await self._database["outbox_lane"].find_one({"_id": lane}, {"owner": 1})
            owner: str | None = row.get("owner") if row else None
            return owner if owner in await living_relays(self._database) else None

    async def topics(self, limit: int) -> list[str]:
        fields = {"event_type": 1, "topic": 1, "routing_key": 1}
        with translated(self._database.where):
            oldest = self._database["outbox"].find({}, fields).sort("position").limit(LOOK_MAX)
            rows = await oldest.to_list()
            blocked = await self._database["outbox_blocked"].find({}, {"_id": 1}).limit(LOOK_MAX).to_list()
        found = {_topic(row, self._store.topic_rule) for row in rows}
        return sorted(found | {row["_id"]["topic"] for row in blocked})[:limit]

    async def blocked_streams(self, limit: int) -> list[BlockedStream]:
        async with self._database.snapshot() as session:
            rows = await self._aggregate("outbox_blocked", blocked_pipeline(limit), session)
        return [BlockedStream(to_stream(row["_id"]), row["cause"], row["until"], row["waiting"]) for row in rows]

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        return await self._database.transaction(replay, self._database, event_ids, actor, self._lanes)

    async def dead_letter(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        outcome = DeadLettered(DeadLetterReason.BY_HAND, failure, OnDeadLetter(policy))
        return await self._database.transaction(dead_letter, self._store, event_id, outcome, actor=actor)

    async def edit(self, event_id: UUID, actor: str, edit: DeadLetterEdit) -> bool:
        return await self._database.transaction(_edit, self._database, event_id, edit, actor)

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        return await self._database.transaction(discard, self._database, event_ids, actor)

    async def _list(self, documents: Documents, wanted: Document, order: tuple[str, int], limit: int) -> list[Document]:
        with translated(self._database.where):
            rows = await documents.find(wanted).sort(*order).limit(limit).to_list()
        return [to_facts(row, _TABLES[documents.name]) for row in rows]

    async def _count(self, name: str, session: Session) -> int:
        rows = await self._aggregate(name, [{"$count": "n"}], session)
        return int(rows[0]["n"]) if rows else 0

    async def _aggregate(self, name: str, pipeline: list[dict[str, Any]], session: Session) -> list[Document]:
        plain = self._database[name].with_options(read_concern=ReadConcern())
        return await (await plain.aggregate(pipeline, session=session)).to_list()


def _wanted(criteria: Criteria) -> Document:
    given = {"event_type": criteria.event_type, "topic": criteria.topic}
    wanted: Document = {name: value for name, value in given.items() if value is not None}
    if criteria.event_ids:
        wanted["_id"] = {"$in": list(criteria.event_ids)}
    if criteria.key is not None:
        # A document of a foreign writer has only the fields of its writer until a relay has filled it in.
        unmet = {"lane": None, "$or": [{"key": criteria.key}, {"key": None, "aggregate_id": criteria.key}]}
        wanted["$or"] = [{"stream_key": criteria.key}, unmet]
    return wanted


def blocked_pipeline(limit: int) -> list[dict[str, Any]]:
    """Return blocked streams with the count of their waiting events; outbox_waiting.

    Streams behind a dead letter come first, because they wait for an operator.
    """
    return [
        {"$set": {"rank": {"$cond": [{"$eq": ["$cause", "dead_letter"]}, 0, 1]}}},
        {"$sort": {"rank": 1, "until": 1, "_id": 1}},
        {"$limit": limit},
        {"$lookup": of_stream([{"$count": "n"}], "waiting")},
        {"$set": {"waiting": {"$ifNull": [{"$first": "$waiting.n"}, 0]}}},
    ]


async def _park_before(
    session: Session, database: MongoDatabase, position: int, stream: Stream, rule: TopicRule
) -> None:
    """Park earlier events of the stream as well; otherwise the relay would publish the skip marker before them."""
    earlier = {"fetchable": stream.lane, "position": {"$lt": position}, "stream_key": stream.key}
    rows = await database["outbox"].find(earlier, session=session).to_list()
    mine = [row for row in rows if _topic(row, rule) == stream.topic]
    if any(row["state"] == State.OPTIMISTIC for row in mine):
        raise Transient("an earlier event of its stream is being sent by its writer; try again in a few seconds")
    if mine:
        change = becoming(State.PARKED, stream.lane, topic=stream.topic)
        await database["outbox"].update_many({"_id": {"$in": [row["_id"] for row in mine]}}, change, session=session)


async def _chosen(session: Session, database: MongoDatabase, event_ids: Sequence[UUID]) -> list[Document]:
    found = database["outbox_dead_letter"].find({"_id": {"$in": list(event_ids)}}, session=session)
    return await found.sort([("position", 1), ("dead_lettered_at", 1), ("_id", 1)]).to_list()


async def _staged_again(
    session: Session, database: MongoDatabase, rows: Sequence[Document], now: datetime, lanes: int
) -> list[Document]:
    """Return dead letters as late events, positioned behind all present events of their streams."""
    counters = [_counter(row, lanes) for row in rows]
    left = Count(counter for counter in counters if counter)
    wanted = {counter: Wanted(count, 0) for counter, count in left.items()}
    last = await run_operations_async(advance(wanted, database.now), session, database.schema)
    staged = []
    for row, counter in zip(rows, counters, strict=True):
        position = time_position(now)
        if counter:
            left[counter] -= 1
            position = last[counter].position - left[counter]
        headers = json.dumps({**json.loads(row["headers"]), "replayed": "true"}, ensure_ascii=False)
        staged.append({**copied(row), "attempts": 0, "headers": headers, **inserted(row["lane"], position)})
    return staged


def _counter(row: Document, lanes: int) -> SequenceCounter | None:
    single = row["stream_key"] == str(row["_id"])
    return None if single else SequenceCounter(row["topic"], row["stream_key"], row["lane"] // lanes)


async def _insert(session: Session, database: MongoDatabase, rows: Sequence[Document]) -> None:
    if rows:
        await database["outbox"].insert_many(rows, session=session)
        await _journal(session, database, JournalKind.STAGED, rows)


async def _journal(session: Session, database: MongoDatabase, kind: JournalKind, rows: Sequence[Document]) -> None:
    if not rows:
        return
    now, journaled = await journal.read_switch(session, database)
    if journaled:
        await journal.add(session, database, kind, [row["_id"] for row in rows], now)


async def _remove(
    session: Session, database: MongoDatabase, dead: Sequence[Document], blocked: Iterable[Document], now: datetime
) -> None:
    removed = {"_id": {"$in": [row["_id"] for row in dead]}}
    await database["outbox_dead_letter"].delete_many(removed, session=session)
    await _unblock(session, database, blocked, now)


async def _unblock(session: Session, database: MongoDatabase, rows: Iterable[Document], now: datetime) -> None:
    """Drain blocked streams after their last blocking dead letter is gone; outbox_dead_letter_blocking."""
    dead_letters, blocked = database["outbox_dead_letter"], database["outbox_blocked"]
    for stream in {Stream(row["lane"], row["topic"], row["stream_key"]) for row in rows}:
        mine = {"_id": stream_id(stream), "cause": BlockReason.DEAD_LETTER.value}
        # Two operators may remove the last two dead letters at the same moment, and each would still see the other one.
        # The write makes one of the transactions start again.
        await blocked.update_one(mine, {"$inc": {"turn": 1}}, session=session)
        rest = {
            "lane": stream.lane,
            "topic": stream.topic,
            "stream_key": stream.key,
            "policy": OnDeadLetter.BLOCK.value,
        }
        if await dead_letters.find_one(rest, {"_id": 1}, session=session) is None:
            drain = {"$set": {"cause": BlockReason.DRAINING.value, "head": None, "until": now}}
            await blocked.update_one(mine, drain, session=session)


async def _record(
    session: Session, database: MongoDatabase, verb: str, actor: str, rows: Sequence[Document], **detail: Any
) -> None:
    await record(session, database, actor, verb, [(row["_id"], None) for row in rows], **detail)


def _topic(row: Document, rule: TopicRule) -> str:
    return topic_of(rule, row["event_type"], row.get("topic"), row.get("routing_key"))


async def adopt_orphans(session: Session, database: MongoDatabase) -> int:
    """Block streams with waiting events but no blocked document, through which a relay finds waiting events."""
    rows = await (await database["outbox"].aggregate(orphans(), session=session)).to_list()
    if rows:
        now = await database.time(session)
        await outbox_settle.ensure_blocked(session, database, [to_stream(row["_id"]) for row in rows], now)
    return len(rows)


async def unblock_without_dead_letter(session: Session, database: MongoDatabase) -> int:
    """Release streams whose blocking dead letter is gone."""
    rows = await (await database["outbox_blocked"].aggregate(blocked_without_dead_letter(), session=session)).to_list()
    if rows:
        drain = {"cause": BlockReason.DRAINING.value, "head": None, "until": database.now}
        mine = {"_id": {"$in": [row["_id"] for row in rows]}}
        await database["outbox_blocked"].update_many(mine, [{"$set": drain}], session=session)
    return len(rows)


class MongoMaintenance:
    """The maintenance of the outbox: keeps the collections bounded."""

    def __init__(self, database: MongoDatabase) -> None:
        self._database, self._operations = database, MongoOperationLog(database)
        self._journal = journal.MongoJournal(database)

    async def sweep(self) -> list[DeadRelay]:
        return await self._database.transaction(_sweep, self._database)

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        database = self._database
        # A task that no relay has run yet has no time, and sorts before every time.
        due = {"$lte": ["$due_at", database.now]}
        again = [{"$set": {"due_at": {"$cond": [due, database.after(every_seconds), "$due_at"]}}}]
        done = await database.run(database["outbox_duty"].update_one({"_id": name}, again, upsert=True))
        return done.upserted_id is not None or done.modified_count == 1

    async def prepare(self) -> None:
        """Do nothing: the archive is one collection without partitions."""

    async def prune(self, retention: Retention) -> Pruned:
        """Remove old documents.

        Also release streams without a blocking dead letter and block streams of orphaned events.
        """
        await self._database.transaction(unblock_without_dead_letter, self._database)
        await self._database.transaction(adopt_orphans, self._database)
        with translated(self._database.where):
            now = await self._database.time()
            await self._prune("outbox_counter", "used", now, COUNTER_DAYS, {})
            await self._journal.note_prune(retention.archive_days)
            return Pruned(
                await self._prune("outbox_archive", "sent_at", now, retention.archive_days, {}),
                # A dead letter that blocks its stream stays until an operator acts.
                await self._expire(now, retention.dead_letter_days),
                await self._remove_operations(retention.operation_days),
                await self._journal.prune(retention.journal_days),
            )

    async def _expire(self, now: datetime, days: float | None) -> int:
        """Remove old dead letters; each leaves a line in the operation log."""
        total, count = 0, 0 if days is None else PRUNE_MAX
        while count == PRUNE_MAX:
            before = now - timedelta(days=days or 0)
            count = await self._database.transaction(_expire_dead_letters, self._database, before)
            total += count
        return total

    async def _remove_operations(self, days: float) -> int:
        try:
            return await self._operations.remove_lines(days)
        except UsageError as error:
            # The role of the relays need not have the right to remove: `outrider audit prune` does it with another.
            if is_unauthorized(error):
                return 0
            raise

    async def _prune(self, name: str, age: str, now: datetime, days: float, only: Document) -> int:
        """Remove the oldest documents, found by the index on their age."""
        documents, total = self._database[name], 0
        old = {age: {"$lt": now - timedelta(days=days)}, **only}
        while True:
            found = [row["_id"] for row in await documents.find(old, {"_id": 1}).sort(age).limit(PRUNE_MAX).to_list()]
            if found:
                total += (await documents.delete_many({"_id": {"$in": found}, **old})).deleted_count
            if len(found) < PRUNE_MAX:
                return total


async def _expire_dead_letters(session: Session, database: MongoDatabase, before: datetime) -> int:
    """Remove some old dead letters, with a line for each in the operation log; outbox_dead_letter_skipped."""
    documents = database["outbox_dead_letter"]
    old = {"dead_lettered_at": {"$lt": before}, "policy": "skip"}
    found = documents.find(old, {"_id": 1}, session=session).sort("dead_lettered_at").limit(PRUNE_MAX)
    rows = await found.to_list()
    await documents.delete_many({"_id": {"$in": [row["_id"] for row in rows]}}, session=session)
    await _record(session, database, EXPIRE_VERB, EXPIRE_ACTOR, rows)
    await _journal(session, database, JournalKind.EXPIRED, rows)
    return len(rows)


async def _sweep(session: Session, database: MongoDatabase) -> list[DeadRelay]:
    lapsed = {"$nor": [living(database)]}
    dead = [row["_id"] for row in await database["outbox_relay"].find(lapsed, session=session).sort("_id").to_list()]
    if not dead:
        return []
    left = await database["outbox_lane"].find({"owner": {"$in": dead}}, session=session).to_list()
    lanes = Counter(lane["owner"] for lane in left)
    await database["outbox_relay"].delete_many({"_id": {"$in": dead}}, session=session)
    return [DeadRelay(relay, lanes[relay]) for relay in dead]


def blocked_without_dead_letter() -> Pipeline:
    """Return some streams that are blocked without a dead letter; outbox_dead_letter_blocking."""
    same = {"lane": "lane", "topic": "topic", "stream_key": "key"}
    mine = {"$and": [{"$eq": [f"${ours}", f"$${theirs}"]} for ours, theirs in same.items()]}
    rest: Pipeline = [
        {"$match": {"policy": OnDeadLetter.BLOCK.value, "$expr": mine}},
        {"$limit": 1},
        {"$project": {"_id": 1}},
    ]
    let = {theirs: f"$_id.{theirs}" for theirs in same.values()}
    return [
        {"$match": {"cause": BlockReason.DEAD_LETTER.value}},
        {"$lookup": {"from": "outbox_dead_letter", "let": let, "pipeline": rest, "as": "dead_letter"}},
        {"$match": {"dead_letter": []}},
        {"$limit": MEND_MAX},
        {"$project": {"_id": 1}},
    ]


def orphans() -> Pipeline:
    """Return some streams with waiting events but no blocked document; outbox_waiting, as a covered query."""
    stream = {"lane": "$waiting", "topic": "$topic", "key": "$stream_key"}
    known = {"from": "outbox_blocked", "localField": "_id", "foreignField": "_id", "as": "known"}
    return [
        {"$match": {"waiting": {"$gte": 0}, "topic": {"$gte": ""}}},
        {"$group": {"_id": stream}},
        {"$lookup": {**known, "pipeline": [{"$project": {"_id": 1}}]}},
        {"$match": {"known": []}},
        {"$limit": MEND_MAX},
        {"$project": {"_id": 1}},
    ]
