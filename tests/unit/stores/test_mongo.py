"""The parts of the MongoDB store that need no server."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from pymongo import errors as mongo

from outrider.errors import OutriderError, Permanent, Transient, Unreachable, UsageError, WriteConflict
from outrider.event import Event, OutboxRow, Stream, lane_of
from outrider.outbox.model import OptimisticClaim, StagedRow, StageRequest, State
from outrider.outbox.validation import StagingRules, validate_events
from outrider.stores.mongo.database import (
    ceiling,
    check_handler,
    check_url,
    client_options,
    floor,
    milliseconds,
    translation,
)
from outrider.stores.mongo.documents import departed, new_row, to_event
from outrider.stores.mongo.operations import Operation, Operations
from outrider.stores.mongo.outbox_settle import skip_marker
from outrider.stores.mongo.schema import Collection, Index, command_of, steps
from outrider.stores.mongo.staging import stage
from tests.support.outbox_rows import staged

NOW = datetime(2030, 1, 1, tzinfo=UTC)
MILLISECONDS = int(NOW.timestamp() * 1000)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://db/shop",
        "mongodb://",
        "mongodb://user:sec/ret@db:27017/",
        "mongodb://user:sec#ret@db:27017/",
        "mongodb://user:secret@db:notaport/",
        "mongodb://user:secret",
        "mongodb://user:sec?ret@db/",
        "mongodb://db/?w=secret&readPreference=nearestest",
    ],
)
def test_a_url_that_would_be_read_differently_is_rejected_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as rejected:
        check_url(url)
    assert "sec" not in str(rejected.value)
    assert "percent-encoded" in str(rejected.value)
    assert rejected.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("mongodb://localhost", "localhost"),
        ("mongodb://user:p%40ss@db1:27017,db2:27018/admin?replicaSet=rs0", "db1:27017,db2:27018"),
        ("mongodb://[::1]:27017/", "[::1]:27017"),
        ("mongodb+srv://user:secret@cluster.example.net/?retryWrites=true", "cluster.example.net"),
    ],
)
def test_a_server_is_named_without_anything_secret(url: str, where: str) -> None:
    assert check_url(url) == f"MongoDB at {where}"


def test_timeouts_in_a_url_are_not_changed() -> None:
    said = client_options("mongodb://db/?connecttimeoutms=5&replicaSet=rs0")
    assert "connectTimeoutMS" not in said
    assert said["socketTimeoutMS"] == 60_000


def _failure(code: int, *labels: str) -> mongo.OperationFailure:
    return mongo.OperationFailure("said so", code, {"errorLabels": list(labels)})


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (mongo.ServerSelectionTimeoutError("nobody"), Unreachable, "is it running"),
        (mongo.ServerSelectionTimeoutError("No replica set members match"), Unreachable, "is replicaSet in the URL"),
        (mongo.NotPrimaryError("stepped down"), Unreachable, "has it a primary"),
        (_failure(189), Unreachable, "has it a primary"),
        (_failure(112, "TransientTransactionError"), WriteConflict, "try again"),
        (_failure(7777, "TransientTransactionError"), WriteConflict, "try again"),
        (_failure(7777, "UnknownTransactionCommitResult"), Transient, "try again"),
        (mongo.ExecutionTimeout("slow", 50), Transient, "try again"),
        (_failure(13), UsageError, "roles of the user"),
        (_failure(18), UsageError, "authSource"),
        (_failure(26), UsageError, "outrider db migrate"),
        (mongo.OperationFailure("only allowed on a replica set member", 20), UsageError, "--replSet"),
        (mongo.ConfigurationError("no such option"), UsageError, "options of the URL"),
        (_failure(121), Permanent, "said so"),
        (mongo.BulkWriteError({"writeErrors": [{"code": 11000, "errmsg": "E11000"}]}), Permanent, "E11000"),
    ],
)
def test_an_error_of_the_driver_is_translated(error: mongo.PyMongoError, kind: type[OutriderError], text: str) -> None:
    said = translation(error, "MongoDB at db")
    assert type(said) is kind
    assert str(said).startswith("MongoDB at db")
    assert text in str(said)


@pytest.mark.parametrize(
    ("hello", "remedy"),
    [
        ({"maxWireVersion": 17}, "--replSet"),
        ({"maxWireVersion": 12, "setName": "rs0"}, "MongoDB 5.0"),
        ({"maxWireVersion": 12, "msg": "isdbgrid"}, "MongoDB 5.0"),
        ({"maxWireVersion": 13, "setName": "rs0"}, None),
        ({"maxWireVersion": 13, "msg": "isdbgrid"}, None),
    ],
)
def test_a_server_that_will_not_do_is_rejected_with_the_remedy(hello: dict[str, Any], remedy: str | None) -> None:
    found = check_handler(hello)
    assert found is None if remedy is None else remedy in str(found)


def test_times_are_whole_milliseconds_and_nothing_is_early() -> None:
    moment = NOW + timedelta(microseconds=1_001)
    assert floor(moment) == NOW + timedelta(milliseconds=1)
    assert ceiling(moment) == NOW + timedelta(milliseconds=2)
    assert ceiling(NOW) == NOW
    assert [milliseconds(seconds) for seconds in (0, 0.1, 0.0011, 4.0)] == [0, 100, 2, 4000]


def test_a_step_is_known_by_its_text() -> None:
    made = steps(1, "0001_outbox", [Collection("box", (Index("box_lane", ("lane", "at"), only={"lane": 1}),))])
    assert [step.name for step in made] == ["box", "box_lane"]
    index = {"key": {"lane": 1, "at": 1}, "name": "box_lane", "partialFilterExpression": {"lane": 1}}
    assert command_of(made[1]) == {"createIndexes": "box", "indexes": [index]}
    other = steps(1, "0001_outbox", [Collection("box", (Index("box_lane", ("lane", "at")),))])
    assert (made[0].checksum, made[1].checksum != other[1].checksum) == (other[0].checksum, True)


def test_an_event_comes_back_as_it_was_staged() -> None:
    [draft] = validate_events(
        [Event("a", {"n": 1}, aggregate_id="A", priority=9, created_at=NOW)], StagingRules()
    ).plain
    event = to_event(new_row(draft, Stream(3, draft.topic, "A"), 7, NOW), NOW)
    assert (event.position, event.event_id, event.payload, event.key) == (7, draft.event_id, b'{"n":1}', "A")
    assert (event.state, event.readiness, event.suspect, event.attempts) == ("pending", "ready", False, 0)
    gone = departed(event, lanes=32)
    assert (gone["_id"], gone["payload"], gone["priority"], gone["stream_key"]) == (draft.event_id, '{"n":1}', 9, "A")
    # A copy of the event has no document, and tells no more than the band of its lane.
    assert departed(event._replace(), lanes=32) == {**gone, "priority": 8}


@pytest.mark.parametrize(("held", "readiness"), [(1, "optimistic"), (0, "ready"), (-1, "ready")])
def test_an_optimistic_claim_counts_until_its_last_millisecond(held: int, readiness: str) -> None:
    [draft] = validate_events([Event("a", 1)], StagingRules()).plain
    row = new_row(draft, Stream(3, draft.topic, "A"), 7, NOW)
    row |= {"state": "optimistic", "claimed_by": "w", "claimed_until": NOW + timedelta(milliseconds=held)}
    assert to_event(row, NOW).readiness == readiness


def test_a_marker_has_the_position_and_the_sequence_and_no_content() -> None:
    event: OutboxRow = staged(9)._replace(sequence=4, attempts=3)
    dead = {**departed(event, 32), "failure": "{}", "policy": "skip", "reason": "x", "dead_lettered_at": NOW}
    marker = skip_marker(dead, State.FAILED)
    assert marker is not None
    assert (marker["position"], marker["sequence"], marker["waiting"], marker["attempts"]) == (9, 4, event.lane, 0)
    assert json.loads(marker["headers"]) == {"skipped": str(event.event_id)}
    assert marker.keys().isdisjoint({"policy", "reason", "dead_lettered_at", "failure", "fetchable"})
    assert skip_marker({**dead, **marker}, State.FAILED) is None


class Server:
    """Answers steps as a server would that holds nothing but counters, and writes down what it was asked."""

    def __init__(self, **known: list[dict[str, Any]]) -> None:
        self.asked: list[Operation] = []
        self.known = known
        self.inserted: list[dict[str, Any]] = []

    def run(self, work: Operations[list[StagedRow]]) -> list[StagedRow]:
        answer: Any = None
        while True:
            try:
                step = work.send(answer)
            except StopIteration as end:
                inserted: list[StagedRow] = end.value
                return inserted
            self.asked.append(step)
            answer = self._answer(step)

    def _answer(self, step: Operation) -> Any:
        if step.collection == "outbox_meta":
            return [{"_id": "lanes", "value": 32, "now": NOW}]
        if step.method == "find_one_and_update":
            return {"_id": step.args[0]["_id"], "position": 1_000, "sequence": 50}
        if step.method == "insert_many":
            self.inserted += step.args[0]
        if step.collection == "outbox_counter" and step.method == "find":
            return [{"_id": found, "position": 1_000, "sequence": 50} for found in step.args[0]["_id"]["$in"]]
        return self.known.get(step.collection, [])


def _drafts(*events: Event) -> StageRequest:
    return validate_events(events, StagingRules())


def test_events_of_a_stream_take_the_last_positions_and_numbers_in_order() -> None:
    server = Server()
    server.run(stage(_drafts(*[Event("a", n, key="K", sequence="auto") for n in range(3)]), None))
    assert [row["position"] for row in server.inserted] == [998, 999, 1_000]
    assert [row["sequence"] for row in server.inserted] == [48, 49, 50]
    assert [step.method for step in server.asked] == ["find", "find_one_and_update", "insert_many"]


def test_counters_are_locked_in_one_order_whatever_order_events_come_in() -> None:
    server = Server()
    server.run(stage(_drafts(Event("b", 1, key="Z"), Event("a", 2, key="Y"), Event("a", 3, key="X")), None))
    [locks] = [step.args[0] for step in server.asked if step.method == "bulk_write"]
    keys = [lock._filter["_id"]["key"] for lock in locks]
    assert keys == ["X", "Y", "Z"]


def test_an_event_without_a_key_takes_the_time_and_no_counter() -> None:
    server = Server()
    server.run(stage(_drafts(Event("a", 1)), None))
    assert [step.collection for step in server.asked] == ["outbox_meta", "outbox"]
    assert server.inserted[0]["position"] == MILLISECONDS * 1000


def test_known_ids_are_dropped_before_anything_is_numbered() -> None:
    ids = [UUID(int=number, version=4) for number in range(1, 5)]
    known = {"outbox": [{"_id": ids[0]}], "outbox_archive": [{"_id": ids[1]}], "outbox_dead_letter": [{"_id": ids[2]}]}
    server = Server(**known)
    events = [Event("a", n, key="K", event_id=event_id, sequence="auto") for n, event_id in enumerate(ids)]
    assert server.run(stage(_drafts(*events), None)) == [StagedRow(ids[3], False)]
    [counted] = [step for step in server.asked if step.collection == "outbox_counter"]
    assert json.dumps(counted.args[1], default=str).count('"$sequence"') == 1
    assert [row["sequence"] for row in server.inserted] == [50]


def test_when_all_ids_are_known_nothing_is_counted_or_written() -> None:
    known = UUID(int=1, version=4)
    server = Server(outbox=[{"_id": known}])
    assert server.run(stage(_drafts(Event("a", 1, key="K", event_id=known)), None)) == []
    assert {step.method for step in server.asked} == {"find"}


def test_a_missing_outbox_is_reported_before_anything_is_written() -> None:
    work = stage(_drafts(Event("a", 1)), None)
    next(work)
    with pytest.raises(UsageError, match="outrider db migrate"):
        work.send([])


BLOCK = OptimisticClaim("writer", 4.0)


def test_an_idle_stream_is_claimed_until_the_servers_time_plus_the_claim() -> None:
    server = Server()
    [inserted] = server.run(stage(_drafts(Event("a", 1, key="K")), BLOCK))
    assert inserted.optimistic
    [row] = server.inserted
    assert (row["state"], row["claimed_by"], row["claimed_until"]) == (
        "optimistic",
        "writer",
        NOW + timedelta(seconds=4),
    )


@pytest.mark.parametrize("busy", ["outbox", "outbox_blocked"])
def test_a_stream_with_something_before_it_is_left_to_the_relay(busy: str) -> None:
    lane, topic = lane_of("K", 5, 32), "events.a"
    rows: dict[str, list[dict[str, Any]]] = {
        "outbox": [{"_id": lane}],
        "outbox_blocked": [{"_id": {"lane": lane, "topic": topic, "key": "K"}}],
    }
    server = Server(**{busy: rows[busy]})
    server.run(stage(_drafts(Event("a", 1, key="K")), BLOCK))
    [row] = server.inserted
    assert (row["state"], "claimed_by" in row) == ("pending", False)


def test_an_event_without_a_key_is_claimed_whatever_else_is_in_its_lane() -> None:
    server = Server(outbox=[{"_id": lane} for lane in range(96)])
    [inserted] = server.run(stage(_drafts(Event("a", 1)), BLOCK))
    assert inserted.optimistic
