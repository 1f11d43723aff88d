"""Query plans of MongoDB for an inbox with 40,000 held events in one stream, and other streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import uuid4

import pytest
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, WriteConcern

from outrider.event import DeadLetterReason, InboxStream, OnDeadLetter, ReceivedEvent
from outrider.inbox.model import (
    Applied,
    EventOutcome,
    Held,
    InboxBlockReason,
    InboxCriteria,
    InboxDeadLettered,
    StreamState,
)
from outrider.stores.mongo import MongoInbox, MongoSchema
from outrider.testing import ManualClock
from outrider.testing.contracts import delivery
from outrider.wire import decode

pytestmark = pytest.mark.mongo

NOW = datetime.now(UTC)
FULL, EARLY = InboxStream("orders", "full"), InboxStream("orders", "k1")
MANY = 40_000
RECEIPTS = 5_000
STREAMS = 2_000
CODEC: CodecOptions[dict[str, Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
DEAD_LETTERED = InboxDeadLettered(DeadLetterReason.PERMANENT_FAILURE, {"error": "no"}, OnDeadLetter.BLOCK, 1)


def _ago(seconds: int) -> datetime:
    return NOW - timedelta(seconds=seconds)


def _stream(key: str) -> dict[str, Any]:
    return {"consumer": "billing", "topic": "orders", "key": key, "band": 1}


def _event(number: int, key: str) -> dict[str, Any]:
    plain = {
        "event_type": "order.placed",
        "raw_key": None,
        "body": b"x",
        "headers": "{}",
        "partition": "",
        "position": "",
    }
    identity = {"consumer": "billing", "event_id": uuid4()}
    facts = {"id": number, "stream": _stream(key), "sequence": number, "replayed": False, "received_at": NOW}
    return {"_id": identity, **facts, **plain}


def _standing(number: int) -> dict[str, Any]:
    cause = {0: "draining", 1: "early", 2: "dead_letter"}.get(number % 100)
    waits = {"cause": cause, "waiting": 1} if cause else {"waiting": 0}
    return {"_id": _stream(f"k{number}"), "seen": number, "since": _ago(number), **waits}


def _letter(number: int) -> dict[str, Any]:
    policy = "block" if number % 2 == 0 else "skip"
    dead_letter = {
        "reason": "poison_message",
        "failure": "{}",
        "policy": policy,
        "attempts": 1,
        "dead_lettered_at": _ago(number),
    }
    return {**_event(MANY + number, f"k{number}"), **dead_letter}


def _documents() -> dict[str, list[dict[str, Any]]]:
    receipts = [
        {
            **{"_id": {"consumer": "billing", "event_id": uuid4()}, "event_type": "order.placed", "topic": "orders"},
            **{"key": f"k{n}", "sequence": n, "received_at": _ago(n), "processing_seconds": 0.01},
        }
        for n in range(RECEIPTS)
    ]
    full = {"_id": _stream("full"), "seen": None, "cause": "draining", "waiting": MANY, "since": _ago(0)}
    waiting = [*(_event(n, "full") for n in range(MANY)), *(_event(MANY + n, f"k{n}") for n in range(0, STREAMS, 100))]
    return {
        "consumer_inbox": receipts,
        "inbox_stream": [full, *map(_standing, range(STREAMS))],
        "inbox_held": waiting,
        "inbox_dead_letter": [_letter(n) for n in range(STREAMS)],
    }


class Watched:
    """An inbox whose commands are looked at by the server's profiler."""

    def __init__(self, inbox: MongoInbox, client: AsyncMongoClient[dict[str, Any]], schema: str) -> None:
        self.inbox, self._database = inbox, client[schema]
        self.removals: list[int] = []
        """How many documents each command has removed."""

    async def during(self, work: Awaitable[Any]) -> tuple[Any, set[str], int]:
        """Do something; return its result, which indexes it used, and how much the server looked at for it."""
        profile = await self._database.create_collection("system.profile", capped=True, size=2**26)
        await self._database.command("profile", 2)
        try:
            result = await work
        finally:
            await self._database.command("profile", 0)
        seen = await profile.find({"ns": {"$not": {"$regex": "system|outbox_"}}}).sort("ts").to_list()
        await profile.drop()
        self.removals = [entry["ndeleted"] for entry in seen if entry["op"] == "remove"]
        looked_at = sum(entry.get("keysExamined", 0) + entry.get("docsExamined", 0) for entry in seen)
        return result, {entry["planSummary"] for entry in seen if "planSummary" in entry}, looked_at


@pytest.fixture
async def watched(mongo_url: str) -> AsyncIterator[Watched]:
    """In a database of its own: to empty one of so much takes longer than to drop it."""
    schema = f"test_{uuid4().hex[:12]}"
    await MongoSchema(mongo_url, schema=schema).migrate()
    async with AsyncMongoClient[dict[str, Any]](mongo_url) as client:
        quick = WriteConcern(w=1, j=False)
        for name, rows in _documents().items():
            collection = client[schema].get_collection(name, codec_options=CODEC, write_concern=quick)
            await collection.insert_many(rows, ordered=False)
        # The inbox reads what a majority has. When that has this, it has all that was written before.
        counter = client[schema].get_collection("inbox_counter", write_concern=WriteConcern("majority"))
        await counter.insert_one({"_id": "waiting", "last": 10 * MANY})
        inbox = await MongoInbox.open(mongo_url, schema=schema, clock=ManualClock(start=NOW))
        yield Watched(inbox, client, schema)
        await inbox.close()
        await client.drop_database(schema)


ID = "IXSCAN { _id: 1 }"
CAUSE = "IXSCAN { _id.consumer: 1, cause: 1, since: 1 }"
PLACE = "IXSCAN { stream: 1, id: 1 }"
SEQUENCE = "IXSCAN { stream: 1, sequence: 1, id: 1 }"


def _received(count: int, key: str = "full") -> list[ReceivedEvent]:
    return [decode(delivery(n, key=key)) for n in range(MANY, MANY + count)]


async def _handle(inbox: MongoInbox, events: list[ReceivedEvent], conclusion: Any, at: StreamState) -> None:
    async with inbox.transaction() as tx:
        await inbox.record_receipts(tx, "billing", events, ordered=True)
        states = {events[0].stream: at}
        await inbox.record_outcomes(tx, "billing", [EventOutcome(event, conclusion) for event in events], states)


async def test_what_comes_is_handled_without_looking_at_what_waits(watched: Watched) -> None:
    waiting = MANY
    for count, conclusion in product((1, 50), (Applied(0.1), Held(), DEAD_LETTERED)):
        waiting += count
        at = StreamState(None, InboxBlockReason.DRAINING, waiting)
        _, plans, looked_at = await watched.during(_handle(watched.inbox, _received(count), conclusion, at))
        assert plans
        assert plans <= {"IDHACK", ID}
        assert looked_at <= 16 * count + 16


async def _resume(inbox: MongoInbox, stream: InboxStream, by_sequence: bool) -> int:
    async with inbox.transaction() as tx:
        claimed = await inbox.claim_held(tx, "billing", stream, by_sequence=by_sequence, limit=10, early=True)
        assert claimed is not None
        back = [decode(w.delivery)._replace(waiting_id=w.waiting_id, event_id=w.event_id) for w in claimed.waiting]
        entries = [EventOutcome(event, Applied()) for event in back]
        await inbox.record_outcomes(
            tx, "billing", entries, {stream: StreamState(None, InboxBlockReason.DRAINING, MANY - len(back))}
        )
        return len(back)


@pytest.mark.parametrize("by_sequence", [False, True])
async def test_what_drains_is_read_from_the_front_of_its_stream(watched: Watched, by_sequence: bool) -> None:
    count, plans, looked_at = await watched.during(_resume(watched.inbox, FULL, by_sequence))
    assert count == 10
    assert plans - {"IDHACK", ID} == {SEQUENCE if by_sequence else PLACE}
    assert looked_at <= 120


async def test_streams_are_found_by_their_block_reason(watched: Watched) -> None:
    inbox = watched.inbox
    for work, count in [
        (inbox.draining("billing", 10), 10),
        (inbox.draining("billing", 10, cause=InboxBlockReason.DEAD_LETTER), 10),
        (inbox.overdue("billing", 60, 10), 10),
        (inbox.overdue("billing", 10 * MANY, 10), 0),
    ]:
        found, plans, looked_at = await watched.during(work)
        assert (len(found), plans) == (count, {CAUSE})
        assert looked_at <= 20
    listed, plans, looked_at = await watched.during(inbox.admin.streams("billing", 100))
    assert {row["cause"] for row in listed[:20]} == {"dead_letter"}
    assert plans == {CAUSE}
    assert looked_at <= 2 * (3 * STREAMS // 100 + 1)
    assert (await inbox.admin.counts("billing"))["waiting"] == MANY + 3 * STREAMS // 100


async def test_a_person_finds_and_moves_dead_letters_by_their_ids(watched: Watched) -> None:
    admin = watched.inbox.admin
    id_ = "IXSCAN { id: 1 }"
    found, plans, looked_at = await watched.during(admin.dead_letters(InboxCriteria(ids=(MANY + 2, MANY + 3))))
    assert (len(found), plans) == (2, {id_})
    assert looked_at <= 6
    for work in (admin.replay([MANY + 2], "ann"), admin.discard([MANY + 4], "ann")):
        count, plans, looked_at = await watched.during(work)
        assert count == 1
        assert plans <= {"IDHACK", ID, id_, "IXSCAN { stream: 1 }", "EOF"}
        assert looked_at <= 24
    released, plans, looked_at = await watched.during(admin.skip_gap("billing", EARLY, "ann"))
    assert plans <= {"IDHACK", ID, SEQUENCE}
    assert (released, looked_at <= 10) == (False, True)


async def test_maintenance_reads_old_rows_and_each_stream_once(watched: Watched) -> None:
    quiet = watched.inbox.prune("billing", receipt_days=1, dead_letter_days=1)
    pruned, plans, looked_at = await watched.during(quiet)
    assert pruned == (0, 0)
    assert not [plan for plan in plans if "COLLSCAN" in plan]
    # Each stream that is held or has events waiting is looked at, and none of the 40,000 events behind one.
    assert looked_at <= 10 * (3 * STREAMS // 100)


async def test_old_receipts_go_in_steps_of_a_bounded_size(watched: Watched) -> None:
    old = watched.inbox.prune("billing", receipt_days=(RECEIPTS - 2_500) / 86_400, dead_letter_days=1_000 / 86_400)
    pruned, plans, looked_at = await watched.during(old)
    assert pruned == (2_499, 500)
    assert watched.removals == [500, 1_000, 1_000, 499]
    assert not [plan for plan in plans if "COLLSCAN" in plan]
    assert looked_at <= 6 * (pruned.receipts + pruned.dead_letters) + 500
