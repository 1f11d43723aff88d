"""Installing and upgrading the collections.

MongoDB creates collections and indexes outside of transactions, so a step runs first and is recorded after. Every step
can be repeated. Therefore an interrupted run resumes, and two migrators at the same time do no harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bson import Int64, json_util
from bson.binary import UUID_SUBTYPE, Binary
from pymongo import UpdateOne
from pymongo.errors import CollectionInvalid, OperationFailure

from outrider.event import BANDS
from outrider.outbox import model
from outrider.outbox.model import JournalKind, State
from outrider.saga.model import MessageKind, Phase, Status, StepStatus, Uncertainty, Undelivered
from outrider.stores import migrations
from outrider.stores.migrations import MigrationProgress, MigrationStep, check_lanes, check_version, choose_lanes
from outrider.stores.mongo.database import MongoDatabase, check_url, translated
from outrider.stores.queries import identifier

RECORD = "outrider_migration"

ALREADY_THERE = 48

SEED = "seed"
"""A step without a server command: inserts the documents that are fixed at installation."""

FIRST_ID = Binary(b"\x00" * 16, UUID_SUBTYPE)

LAST_ID = Binary(b"\xff" * 16, UUID_SUBTYPE)

FIRST_TIME = datetime(1900, 1, 1, tzinfo=UTC)

LAST_TIME = datetime(9000, 1, 1, tzinfo=UTC)

_NUMBER = ["int", "long"]

_TEXTS = ("payload", "headers", "retry")

TEXT_BYTES_MAX = 15 * 2**20
"""The maximum size of payload, headers and retry policy of an event together."""

_EXISTS: dict[str, Any] = {
    **{name: {"bsonType": _NUMBER} for name in ("lane", "position", "attempts")},
    "schema_version": {"bsonType": [*_NUMBER, "string"]},
    **{name: {"bsonType": "string"} for name in ("stream_key", "headers")},
    "state": {"enum": sorted(model.STORED)},
    "created_at": {"bsonType": "date"},
}

_DATE: dict[str, Any] = {"$type": "date"}


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection, its indexes, and the validation rule of its documents (None: no rule)."""

    name: str
    indexes: tuple[Index, ...] = ()
    validator: Mapping[str, Any] | None = None
    seeded: bool = False

    def steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the commands that create the collection and its indexes, by name."""
        rules = {} if self.validator is None else {"validator": dict(self.validator)}
        yield self.name, {"create": self.name, **rules}
        for index in self.indexes:
            yield index.name, index.command(self.name)
        if self.seeded:
            yield f"{self.name}_documents", {SEED: self.name}


@dataclass(frozen=True, slots=True)
class Index:
    """An index: its keys in order, and the condition of a partial index (None: all documents)."""

    name: str
    keys: tuple[str, ...]
    only: Mapping[str, Any] | None = None
    unique: bool = False

    def command(self, collection: str) -> dict[str, Any]:
        """Return the command that creates the index.

        >>> Index("outbox_archive_sent", ("sent_at",)).command("outbox_archive")["createIndexes"]
        'outbox_archive'
        """
        index: dict[str, Any] = {"key": dict.fromkeys(self.keys, 1), "name": self.name}
        if self.only is not None:
            index["partialFilterExpression"] = dict(self.only)
        if self.unique:
            index["unique"] = True
        return {"createIndexes": collection, "indexes": [index]}


INBOX_COLLECTIONS: tuple[Collection, ...] = (
    # Receipts: a consumer has handled an event.
    Collection("consumer_inbox", indexes=(Index("consumer_inbox_age", ("_id.consumer", "received_at")),)),
    # Stream states of a consumer: a permanent document for every stream with a sequence check; otherwise a document
    # only while events are held. A cause exists only while events are held.
    Collection(
        "inbox_stream",
        indexes=(Index("inbox_stream_cause", ("_id.consumer", "cause", "since"), only={"cause": {"$exists": True}}),),
    ),
    # Held events, stored completely as received. A dead letter keeps the id of its held event, so a replayed event has
    # its old position.
    Collection(
        "inbox_held",
        indexes=(
            Index("inbox_held_place", ("stream", "id")),
            Index("inbox_held_sequence", ("stream", "sequence", "id")),
        ),
    ),
    # The last id of a held event.
    Collection("inbox_counter"),
    Collection(
        "inbox_dead_letter",
        indexes=(
            Index("inbox_dead_letter_id", ("id",), unique=True),
            Index("inbox_dead_letter_blocking", ("stream",), only={"policy": "block"}),
            # Dead letters that may be pruned.
            Index("inbox_dead_letter_age", ("_id.consumer", "dead_lettered_at"), only={"policy": "skip"}),
        ),
    ),
)


def _readable_time(name: str) -> dict[str, Any]:
    return {"$or": [{name: None}, {name: {"$gte": FIRST_TIME, "$lt": LAST_TIME}}]}


def optional(kinds: str | list[str], *names: str) -> dict[str, Any]:
    """Return the rule for optional fields of one BSON type.

    >>> optional("date", "sent_at")
    {'sent_at': {'bsonType': ['date', 'null']}}
    """
    listed = [kinds] if isinstance(kinds, str) else kinds
    return {name: {"bsonType": [*listed, "null"]} for name in names}


def texts(*names: str, longest: int = 1000) -> dict[str, Any]:
    """Return the rule for optional text fields.

    >>> texts("topic")
    {'topic': {'bsonType': ['string', 'null'], 'maxLength': 1000}}
    """
    return {name: {"bsonType": ["string", "null"], "maxLength": longest} for name in names}


OUTBOX_RULES = {
    "$jsonSchema": {
        "required": ["event_type", "payload"],
        "additionalProperties": False,
        # A writer that sets a lane must also set all fields that a relay reads from an event with a lane.
        "anyOf": [
            {"properties": {"lane": {"bsonType": "null"}}},
            {"properties": _EXISTS, "required": list(_EXISTS)},
        ],
        "properties": {
            "_id": {"bsonType": "binData"},
            "event_type": {"bsonType": "string", "minLength": 1, "maxLength": 1000},
            "payload": {"bsonType": "string"},
            "headers": {"bsonType": ["string", "null"]},
            **texts("aggregate_type", "aggregate_id", "topic", "key", "stream_key", "routing_key", "saga_id"),
            "priority": {"bsonType": [*_NUMBER, "null"], "minimum": 0, "maximum": 9},
            "state": {"enum": [*sorted(model.STORED), None]},
            **optional(_NUMBER, "sequence", "max_attempts", "position", "attempts"),
            # A whole number, or a semantic version as text.
            "schema_version": {"bsonType": [*_NUMBER, "string", "null"], "maxLength": 100},
            **optional(_NUMBER, "lane", "fetchable", "waiting"),
            **optional("string", "retry", "failure", "claimed_by"),
            **optional("date", "created_at", "available_at", "claimed_until"),
            **optional("bool", "suspect"),
        },
    },
    # The server orders binary values by length, then by kind: only UUIDs lie between these two values.
    "_id": {"$gte": FIRST_ID, "$lte": LAST_ID},
    "$and": [
        *(_readable_time(name) for name in ("created_at", "available_at", "claimed_until")),
        # An event with a lane must be in one of the two indexes; otherwise no relay would find the event.
        {"$or": [{"lane": None}, {"fetchable": {"$type": "number"}}, {"waiting": {"$type": "number"}}]},
        # A position requires a lane. A document without a position is a document that no relay has filled in yet.
        {"$or": [{"position": None}, {"lane": {"$type": "number"}}]},
        {"$or": [{"lane": None}, {"state": {"$ne": State.OPTIMISTIC.value}}, {"claimed_until": {"$type": "date"}}]},
        # A waiting event is found by its topic.
        {"$or": [{"waiting": None}, {"topic": {"$gt": ""}}]},
    ],
    # A document holds 16 MB. Later additions, such as a failure, need room; otherwise the event could never leave.
    "$expr": {"$lte": [{"$bsonSize": {name: f"${name}" for name in _TEXTS}}, TEXT_BYTES_MAX]},
}


OUTBOX_COLLECTIONS = (
    # Undelivered events. `fetchable` holds the lane of an event at the start of its lane, `waiting` the lane of an
    # event in a blocked stream. So every document is in exactly the index that finds it.
    Collection(
        "outbox",
        validator=OUTBOX_RULES,
        indexes=(
            # The start of each lane.
            Index("outbox_fetchable", ("fetchable", "position"), only={"fetchable": {"$exists": True}}),
            # The events of each blocked stream, in order.
            Index(
                "outbox_waiting", ("waiting", "topic", "stream_key", "position"), only={"waiting": {"$exists": True}}
            ),
            # First the documents of foreign writers that no relay has filled in, in order of insertion: they have no
            # position. Then all other events, oldest first, for listings of the admin.
            Index("outbox_position", ("position",)),
        ),
    ),
    # Lanes: the owner, the epoch, and the number of writes of the owner.
    Collection("outbox_meta"),
    Collection("outbox_lane", seeded=True),
    # One heartbeat per relay.
    Collection("outbox_relay"),
    # Blocked streams: the reason, the blocking event, and the due time (null: until an operator acts).
    Collection(
        "outbox_blocked",
        indexes=(
            Index("outbox_blocked_lane", ("lane",)),
            Index("outbox_blocked_due", ("until", "lane"), only={"until": {"$type": "date"}}),
        ),
    ),
    # The last position and the last sequence number of each stream. An unnumbered stream has the day of its last use.
    Collection("outbox_counter", indexes=(Index("outbox_counter_used", ("used",), only={"used": {"$exists": True}}),)),
    # Delivered events.
    Collection("outbox_archive", indexes=(Index("outbox_archive_sent", ("sent_at",)),)),
    # Undeliverable events with their failures.
    Collection(
        "outbox_dead_letter",
        indexes=(
            Index("outbox_dead_letter_position", ("position",)),
            Index("outbox_dead_letter_blocking", ("lane", "topic", "stream_key"), only={"policy": "block"}),
            Index("outbox_dead_letter_skipped", ("dead_lettered_at",), only={"policy": "skip"}),
        ),
    ),
    # Actions of operators, by event.
    Collection("outbox_operation", indexes=(Index("outbox_operation_at", ("at",)),)),
    # The next due time of each maintenance task.
    Collection("outbox_duty"),
)


def _one_of(kind: Iterable[str]) -> dict[str, Any]:
    return {"enum": [str(value) for value in kind]}


def _rules(required: Iterable[str], **properties: Any) -> dict[str, Any]:
    return {"$jsonSchema": {"required": list(required), "properties": properties}}


SAGA_COLLECTIONS = (
    # Sagas. `wake_at` is the next due time or the end of the owner's claim. `turns` counts the locks of a saga, `notes`
    # the entries of its audit log.
    Collection(
        "saga_instance",
        validator=_rules(
            ("saga_type", "definition_version", "correlation_id", "state", "status", "version", "epoch", "losses"),
            status=_one_of(Status),
            state={"bsonType": "string"},
            **texts("correlation_id", "owner"),
            **optional("date", "started_at", "updated_at", "ended_at", "wake_at", "claimed_from", "deadline_at"),
        ),
        indexes=(
            # One saga per type and correlation id.
            Index("saga_instance_name", ("saga_type", "correlation_id"), unique=True),
            # The few sagas with a due time, by definition.
            Index("saga_instance_due", ("saga_type", "definition_version", "wake_at"), only={"wake_at": _DATE}),
            # Sagas with an owner: the few whose claim may be from before the clock was set back.
            Index(
                "saga_instance_claimed",
                ("saga_type", "definition_version", "claimed_from"),
                only={"claimed_from": _DATE},
            ),
            # Sagas that were lost with their workers: the few that may become suspects.
            Index("saga_instance_lost", ("saga_type", "definition_version", "wake_at"), only={"losses": {"$gt": 0}}),
            # Sagas that may be pruned.
            Index("saga_instance_age", ("ended_at",), only={"ended_at": _DATE, "needs_attention": False}),
            # The children of a saga.
            Index("saga_instance_parent", ("parent_id",), only={"parent_id": {"$type": "binData"}}),
        ),
    ),
    # The journal: one entry per step and phase.
    Collection(
        "saga_step",
        validator=_rules(
            ("saga_id", "step", "phase"),
            phase=_one_of(Phase),
            status=_one_of(StepStatus),
            uncertainty={"enum": [*map(str, Uncertainty), None]},
            undelivered={"enum": [*map(str, Undelivered), None]},
        ),
        indexes=(Index("saga_step_line", ("saga_id", "step", "phase"), unique=True),),
    ),
    # Messages to sagas: `_id` is the saga and the event. A copy of the saga's definition leads a worker directly to the
    # messages that it can read.
    Collection(
        "saga_mailbox",
        validator=_rules(
            ("saga_id", "message_id", "name", "body"),
            kind=_one_of(MessageKind),
            body={"bsonType": "string"},
            message_id={"bsonType": "long"},
        ),
        indexes=(
            # The mailbox of a saga, in order of insertion. Message numbers are unique per saga.
            Index("saga_mailbox_order", ("saga_id", "message_id"), unique=True),
            # Messages that wake a worker.
            Index("saga_mailbox_unseen", ("saga_type", "definition_version", "message_id"), only={"unseen": True}),
        ),
    ),
    # The audit log: the action, the time and the actor. The audit log outlives the saga.
    Collection(
        "saga_audit_log",
        indexes=(
            Index("saga_audit_saga", ("saga_id", "number"), unique=True),
            Index("saga_audit_age", ("at",)),
        ),
    ),
    # The anchors of the audit log, by number: `close` covers the heads of removed sagas, `prune` the removal of their
    # lines. Anchors stay for ever.
    Collection(
        "saga_audit_anchor",
        validator=_rules(("kind", "digest", "hash"), kind={"enum": ["close", "prune"]}),
        indexes=(Index("saga_audit_anchor_covers", ("covers",), unique=True, only={"covers": {"$type": "long"}}),),
    ),
    # The heads of the chains of removed sagas, until their lines are removed.
    Collection(
        "saga_audit_head",
        indexes=(
            Index("saga_audit_head_saga", ("saga_id",)),
            Index("saga_audit_head_anchor", ("anchor",)),
        ),
    ),
    # Commands at participants, with their replies; `_id` is participant, key and phase. A barred action came after its
    # compensation, or never. A barred compensation had no action to compensate.
    Collection("saga_barrier", indexes=(Index("saga_barrier_age", ("at",)),)),
)


PAYLOAD_COLLECTIONS = (
    # The schemas of event types, by type and version.
    Collection(
        "payload_schema",
        validator=_rules(("document", "registered_at", "registered_by"), document={"bsonType": "string"}),
    ),
    # The last published value of an increasing field in each stream: `_id` is rule, lane, topic and key.
    Collection("payload_last_value"),
)


PRIVACY_COLLECTIONS = (
    # The keys that encrypt fields, by id. Each is wrapped with a master key that is not in the database.
    Collection(
        "encryption_key",
        validator=_rules(("wrapped", "created_at", "created_by"), wrapped={"bsonType": "string"}),
    ),
)


SUBJECT_COLLECTIONS = (
    # The keys of subjects, by id, wrapped as those above. A destroyed key stays without its wrapped form, and with a
    # hash of its subject.
    Collection(
        "subject_key",
        validator=_rules(("subject", "created_at"), wrapped={"bsonType": ["string", "null"]}),
        indexes=(
            # A subject has one live key at most.
            Index("subject_key_live", ("subject",), only={"wrapped": {"$type": "string"}}, unique=True),
            Index("subject_key_destroyed", ("subject",), only={"destroyed_at": _DATE}),
        ),
    ),
)


JOURNAL_COLLECTIONS = (
    # The journal of the outbox: append only, and pruned by age. The server fills in the log position.
    Collection(
        "outbox_journal",
        validator=_rules(
            ("kind", "event_id", "transaction_id", "log_position", "at"),
            kind=_one_of(JournalKind),
            event_id={"bsonType": "binData"},
            log_position={"bsonType": "timestamp"},
            at={"bsonType": "date"},
        ),
        indexes=(
            # The entries of an event in order, for the check.
            Index("outbox_journal_event", ("event_id", "log_position")),
            # Entries that may be pruned.
            Index("outbox_journal_age", ("at", "_id")),
        ),
    ),
)


SAGA_SUBJECT = Index("saga_instance_subject", ("subject",), only={"subject": {"$type": "string"}})
"""The index of the sagas that have a subject."""


ERASURE_COLLECTIONS = (
    # A run for each erased subject, by the hash of the subject. Runs stay for ever. `open` is there until the end.
    Collection(
        "gdpr_erasure_log",
        validator=_rules(("subject_hash", "actor", "started_at", "counts"), counts={"bsonType": "string"}),
        indexes=(
            Index("gdpr_erasure_log_subject", ("subject_hash", "started_at")),
            # One open run for each subject.
            Index("gdpr_erasure_log_open", ("subject_hash",), only={"open": True}, unique=True),
        ),
    ),
)

ERASURE_INDEXES = (
    # Removed sagas by the hash of their subject, so that the details of their lines can still be erased.
    (
        "saga_audit_head",
        Index("saga_audit_head_subject", ("subject_hash",), only={"subject_hash": {"$type": "string"}}),
    ),
)


def _step(version: int, migration: str, name: str, command: dict[str, Any]) -> MigrationStep:
    text = json_util.dumps(command, json_options=json_util.RELAXED_JSON_OPTIONS, ensure_ascii=False)
    return MigrationStep(version, migration, name, text, hashlib.sha256(text.encode()).hexdigest()[:16])


def steps(version: int, migration: str, collections: Iterable[Collection]) -> list[MigrationStep]:
    """Return the steps of a migration that creates the given collections.

    >>> [step.name for step in steps(1, "0001_outbox", [Collection("outbox_lane", seeded=True)])]
    ['outbox_lane', 'outbox_lane_documents']
    """
    return [_step(version, migration, *named) for collection in collections for named in collection.steps()]


OPERATION_LOG_COMMANDS: tuple[tuple[str, dict[str, Any]], ...] = (
    # A new line has a number in the chain; lines that are there already stay as they are.
    (
        "outbox_operation_numbered",
        {
            "collMod": "outbox_operation",
            "validator": _rules(("line", "at", "actor", "verb", "hash"), line={"bsonType": "long", "minimum": 1}),
            "validationLevel": "moderate",
        },
    ),
    # The lines in the order of the chain.
    ("outbox_operation_line", Index("outbox_operation_line", ("line", "_id")).command("outbox_operation")),
    # The anchors of the operation log, which have no chains of sagas.
    (
        "saga_audit_anchor_operations",
        Index("saga_audit_anchor_operations", ("chains", "_id"), only={"chains": 0}).command("saga_audit_anchor"),
    ),
    # The end of the chain: the number of lines, the hash of the last one, and the count of lines without a number.
    *Collection("outbox_operation_head", seeded=True).steps(),
)


STEPS: tuple[MigrationStep, ...] = (
    *steps(1, "0001_outbox", OUTBOX_COLLECTIONS),
    *steps(2, "0002_inbox", INBOX_COLLECTIONS),
    *steps(3, "0003_saga", SAGA_COLLECTIONS),
    *steps(4, "0004_payload", PAYLOAD_COLLECTIONS),
    *steps(5, "0005_privacy", PRIVACY_COLLECTIONS),
    *steps(6, "0006_subject", SUBJECT_COLLECTIONS),
    _step(6, "0006_subject", SAGA_SUBJECT.name, SAGA_SUBJECT.command("saga_instance")),
    *steps(7, "0007_erasure", ERASURE_COLLECTIONS),
    *(_step(7, "0007_erasure", index.name, index.command(name)) for name, index in ERASURE_INDEXES),
    *steps(8, "0008_journal", JOURNAL_COLLECTIONS),
    *(_step(9, "0009_operation_log", *named) for named in OPERATION_LOG_COMMANDS),
)


class MongoSchema:
    """Migrations of one database. The number of lanes is fixed by the first migration.

    >>> MongoSchema("mongodb://localhost/?replicaSet=rs0", schema="shop").schema
    'shop'
    """

    def __init__(self, url: str, *, schema: str = "outrider", lanes: int | None = None) -> None:
        check_lanes(lanes)
        self.url, self.schema, self._lanes = url, identifier(schema), lanes
        check_url(url)

    async def status(self) -> list[MigrationProgress]:
        """Return the progress of each migration, without changes to the database."""
        async with self._opened() as database:
            return migrations.progress(STEPS, await applied(database))

    async def plan(self) -> list[MigrationStep]:
        """Return the steps that `migrate` would run, without changes to the database."""
        async with self._opened() as database:
            return migrations.pending(STEPS, await applied(database))

    async def migrate(self) -> list[MigrationStep]:
        """Run and record all pending steps, and return them."""
        async with self._opened() as database:
            found = await database["outbox_meta"].find_one({"_id": "lanes"})
            lanes = choose_lanes(found["value"] if found else None, self._lanes)
            todo = migrations.pending(STEPS, await applied(database))
            for step in todo:
                await self._apply(database, step, lanes)
            return todo

    async def _apply(self, database: MongoDatabase, step: MigrationStep, lanes: int) -> None:
        command = command_of(step)
        if command.get(SEED) == "outbox_lane":
            await _seed_lanes(database, lanes)
        elif SEED in command:
            await _seed_head(database)
        else:
            await _make(database, command)
        facts = {"checksum": step.checksum, "applied_at": "$$NOW"}
        identity = {"version": step.version, "step": step.name}
        # A pipeline, because the time must be the server's. A second migrator writes the same values.
        await database[RECORD].update_one({"_id": identity}, [{"$set": facts}], upsert=True)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[MongoDatabase]:
        database = await MongoDatabase.open(self.url, self.schema)
        try:
            with translated(database.where):
                yield database
        finally:
            await database.close()


async def applied(database: MongoDatabase) -> dict[tuple[int, str], str]:
    """Return the recorded steps with their checksums, empty before the first installation."""
    with translated(database.where):
        rows = await database[RECORD].find().to_list()
    return {(row["_id"]["version"], row["_id"]["step"]): row["checksum"] for row in rows}


async def installed(database: MongoDatabase, version: int) -> bool:
    """Return whether all steps of a migration are recorded.

    ```python
    if not await installed(database, version=2):
        raise UsageError("the inbox is not installed; run: outrider db migrate")
    ```
    """
    done = await applied(database)
    return all((step.version, step.name) in done for step in STEPS if step.version == version)


async def check_installed_version(database: MongoDatabase) -> None:
    """Reject collections that this code does not understand."""
    facts = {row["_id"]: row["value"] for row in await database["outbox_meta"].find().to_list()}
    check_version(f"{database.where}, database {database.schema}", facts)


async def _make(database: MongoDatabase, command: dict[str, object]) -> None:
    """Create a collection or an index, unless present: an earlier run may have ended before its record."""
    try:
        await database.client[database.schema].command(command)
    except (CollectionInvalid, OperationFailure) as error:
        if getattr(error, "code", None) != ALREADY_THERE:
            raise


async def _seed_lanes(database: MongoDatabase, lanes: int) -> None:
    """Fix the number of lanes and insert one free document per lane. The number of the first migrator counts.

    The version of the collections is recorded as well, and the version that code must know to work with them.
    """
    meta = database["outbox_meta"]
    for name, value in (("lanes", lanes), ("version", 1), ("code_min", 1)):
        await meta.update_one({"_id": name}, {"$setOnInsert": {"value": value}}, upsert=True)
    found = await meta.find_one({"_id": "lanes"})
    assert found is not None, "the document existed a moment ago, and is never removed"
    free = {"$setOnInsert": {"owner": None, "epoch": 0, "turn": 0}}
    lane_documents = [UpdateOne({"_id": lane}, free, upsert=True) for lane in range(BANDS * found["value"])]
    await database["outbox_lane"].bulk_write(lane_documents, ordered=False)


async def _seed_head(database: MongoDatabase) -> None:
    """Count the lines without a number, of which no more can be added by now."""
    unchained = await database["outbox_operation"].count_documents({"line": None})
    head = {"lines": Int64(0), "hash": b"", "unchained": Int64(unchained)}
    await database["outbox_operation_head"].update_one({"_id": 1}, {"$setOnInsert": head}, upsert=True)


def command_of(step: MigrationStep) -> dict[str, Any]:
    """Return the command in the text of a step.

    >>> command_of(steps(1, "0001_outbox", [Collection("outbox_lane")])[0])
    {'create': 'outbox_lane'}
    """
    command: dict[str, Any] = json_util.loads(step.sql)
    return command
