"""Statements for a connection of the caller to PostgreSQL: their texts, parameters and results.

Each function is a generator that yields a statement, receives its rows and returns the result. The functions know no
driver, so they serve all drivers, synchronous or asynchronous. Rows are read by position. Results contain only ids,
texts and booleans, because drivers differ in their types for JSON and times.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from outrider.event import SKIPPED_TYPE, band_of
from outrider.outbox.model import NewEvent, OptimisticClaim, StagedRow, StageRequest
from outrider.saga.model import Claim, NewSaga, NewSagaMessage, ParticipantEntry, Phase, SagaChange
from outrider.stores import migrations, queries
from outrider.stores.migrations import LATER, Installer, MigrationStep
from outrider.stores.queries import identifier
from outrider.stores.rows import SagaWriteSet, entry_row

T = TypeVar("T")

UNIQUE_VIOLATION = "23505"

_NO_EVENTS: Mapping[str, str] = MappingProxyType({})

Rows = Sequence[Sequence[Any]]

_CROSSED = {
    UNIQUE_VIOLATION: "the same event_id is being staged for another stream at this moment; retry the transaction, and "
    "give each event an id of its own"
}

_PACKAGE = "outrider.stores.postgres"

DAYS_AHEAD = 7
"""The number of days after today for which archive partitions are created in advance."""

ENTRY_COLUMNS = 15

LINE_COLUMNS = 11


COSTLY = "(SELECT count(*) FROM generate_series(1, 1000000000)) = 0"
"""A condition that is costly by estimate and never evaluated: the second part of `($1 IS NOT NULL OR {costly})`.

A plan that knows $1 contains nothing of it. A plan for any $1 is so costly that the server keeps none, and plans the
statement for the present size of its tables. A plan from a time when a table was empty would read all of the table for
each row, until the server has analyzed the table again."""


NO_JOURNAL = "num_nonnulls"
"""The function in the place of the journal's. Any will do: where the journal is not installed, it is never called."""


class Statement(NamedTuple):
    """One statement, its parameters, and the SQLSTATE after which a retry may succeed, with the reason."""

    sql: str
    args: Sequence[Any]
    transient: Mapping[str, str] = _NO_EVENTS


Statements = Generator[Statement, Rows, T]
"""A generator that yields statements, receives their rows and returns a result."""


@cache
def load(schema: str, *, journal: bool = False) -> dict[str, str]:
    """Return the statements of the outbox by name. Those that settle write to the journal only if it is installed.

    >>> load("outrider")["release"].startswith("-- Give lanes back")
    True
    """
    called = f"{identifier(schema)}.outbox_journal_add" if journal else NO_JOURNAL
    return _load(schema, "outbox", "stage", "outbox_admin", "checks", journal_add=called)


def stage(schema: str, request: StageRequest, claim: OptimisticClaim | None) -> Statements[list[StagedRow]]:
    """Insert events: one statement, or two if known ids must be looked up.

    >>> from outrider.event import Event
    >>> from outrider.outbox.validation import StagingRules, validate_events
    >>> statements = stage("outrider", validate_events([Event("order.placed", {})], StagingRules()), None)
    >>> next(statements).sql.startswith("-- The most common call")
    True
    """
    sql = load(schema)
    inserted = (yield from _stage_plain(sql, request, claim)) if request.plain else []
    return inserted + ((yield from _stage_numbered(sql, request, claim)) if request.numbered else [])


@cache
def load_saga(schema: str) -> dict[str, str]:
    """Return the statements of sagas by name.

    >>> "claim" in load_saga("outrider")
    True
    """
    return _load(schema, "saga")


def start_saga(schema: str, new: NewSaga) -> Statements[bool]:
    """Insert a saga; return False if the saga exists."""
    return bool((yield Statement(load_saga(schema)["start"], start_parameters(new))))


def deliver_messages(schema: str, messages: Sequence[NewSagaMessage]) -> Statements[int]:
    """Insert messages to sagas; return the number of new messages."""
    return len((yield Statement(load_saga(schema)["deliver"], message_parameters(messages))))


def participant_enter(schema: str, participant: str, key: str, phase: Phase) -> Statements[ParticipantEntry]:
    """Register a command at a participant, or return the result of its earlier delivery."""
    sql = load_saga(schema)
    if rows := (yield Statement(sql[f"enter_{phase.value}"], (participant, key))):
        return ParticipantEntry(True, rows[0][0])
    [(barred, reply)] = yield Statement(sql["participant_reply"], (participant, key, phase.value))
    return ParticipantEntry(False, barred, None if reply is None else reply.encode())


def participant_save_reply(schema: str, participant: str, key: str, phase: Phase, reply: bytes) -> Statements[None]:
    """Store the reply to a command, as JSON."""
    yield Statement(load_saga(schema)["save_reply"], (participant, key, phase.value, reply.decode()))


OPERATIONS: Mapping[str, Callable[..., Statements[Any]]] = {
    "stage": stage,
    "start_saga": start_saga,
    "deliver_messages": deliver_messages,
    "participant_enter": participant_enter,
    "participant_save_reply": participant_save_reply,
}


def _stage_plain(
    sql: dict[str, str], request: StageRequest, claim: OptimisticClaim | None
) -> Statements[list[StagedRow]]:
    if claim is None and len(request.plain) == 1:
        rows = yield Statement(sql["stage_one"], request.plain[0])
    else:
        rows = yield _several(sql["stage"], request.plain, claim)
    inserted = _inserted_rows(rows)
    if not request.supplied or not inserted:
        return inserted
    taken_back = yield Statement(sql["retract"], ([row.event_id for row in inserted],))
    removed = {row[0] for row in taken_back}
    if removed:
        [[has_journal]] = yield Statement(sql["has_journal"], ())
        if has_journal:
            yield Statement(sql["journal_retracted"], (list(removed),))
    return [row for row in inserted if row.event_id not in removed]


def _stage_numbered(
    sql: dict[str, str], request: StageRequest, claim: OptimisticClaim | None
) -> Statements[list[StagedRow]]:
    if claim is None and len(request.numbered) == 1 and not request.supplied:
        return _inserted_rows((yield Statement(sql["stage_numbered_one"], request.numbered[0])))
    yield Statement(sql["lock_counters"], counter_parameters(request.numbered))
    return _inserted_rows((yield _several(sql["stage_numbered"], request.numbered, claim)._replace(transient=_CROSSED)))


def _several(sql: str, events: Sequence[NewEvent], claim: OptimisticClaim | None) -> Statement:
    return Statement(sql, stage_parameters(events, claim))


def _inserted_rows(rows: Rows) -> list[StagedRow]:
    return [StagedRow(row[0], row[1] == "optimistic") for row in rows]


def stage_parameters(events: Sequence[NewEvent], claim: OptimisticClaim | None) -> list[Any]:
    """Return the arrays of `stage` and `stage_numbered`, one per column, and the optimistic claim."""
    columns: list[Any] = [list(column) for column in zip(*events, strict=True)]
    return [*columns, claim.owner if claim else None, claim.seconds if claim else None]


def counter_parameters(events: Sequence[NewEvent]) -> list[list[Any]]:
    """Return the distinct streams whose counters `lock_counters` locks, in order."""
    streams = sorted({(new.topic, new.key or new.aggregate_id or "", band_of(new.priority)) for new in events})
    return [list(column) for column in zip(*streams, strict=True)]


@cache
def load_inbox(schema: str) -> dict[str, str]:
    """Return the statements of consumers by name.

    >>> "record_receipt" in load_inbox("outrider")
    True
    """
    return _load(schema, "inbox")


@cache
def load_payload(schema: str) -> dict[str, str]:
    """Return the statements of payloads by name.

    >>> "schemas" in load_payload("outrider")
    True
    """
    return _load(schema, "payload")


@cache
def load_privacy(schema: str) -> dict[str, str]:
    """Return the statements of keys and of reencryption by name.

    >>> "insert_key" in load_privacy("outrider")
    True
    """
    return _load(schema, "privacy")


@cache
def load_journal(schema: str) -> dict[str, str]:
    """Return the statements of the journal by name.

    >>> "entries" in load_journal("outrider")
    True
    """
    return _load(schema, "journal")


@cache
def load_operation_log(schema: str) -> dict[str, str]:
    """Return the statements of the operation log by name.

    >>> "lock_head" in load_operation_log("outrider")
    True
    """
    return _load(schema, "saga", "operation_log")


@cache
def load_erasure(schema: str) -> dict[str, str]:
    """Return the statements of erasure by name, with pieces of those of the outbox and of sagas.

    >>> "erase_saga" in load_erasure("outrider")
    True
    """
    return _load(schema, "outbox", "saga", "erasure", journal_add=NO_JOURNAL)


def _load(schema: str, *files: str, **known: str) -> dict[str, str]:
    return queries.load(_PACKAGE, [f"sql/{file}.sql" for file in files], {**constants(schema), **known})


def constants(schema: str, lanes: int = 0) -> dict[str, str]:
    """Return the constants of the `.sql` files; the number of lanes is for the migrations only."""
    return {**queries.constants(schema), "lanes": str(lanes), "skipped_type": SKIPPED_TYPE, "costly": COSTLY}


def installer(schema: str) -> Installer:
    """Return the installer of one schema.

    >>> installer("shop").written(1, 32)[1]
    'CREATE SCHEMA IF NOT EXISTS shop'
    """
    known = {**constants(schema), **LATER, "days_ahead": str(DAYS_AHEAD)}
    texts = queries.load(_PACKAGE, ["sql/schema.sql"], known)

    def steps(lanes: int) -> list[MigrationStep]:
        return migrations.steps(_PACKAGE, constants(schema, lanes))

    return Installer(
        steps,
        texts,
        begin=("create_schema", "create_record"),
        turn=("take_turn",),
        finish={1: "partitions_ahead"},
    )


def start_parameters(saga: NewSaga) -> list[Any]:
    """Return the parameters of `start`."""
    return [*saga[:4], saga.state.decode(), *saga[5:]]


def message_parameters(messages: Sequence[NewSagaMessage]) -> list[list[Any]]:
    """Return the arrays of `deliver`, one per column."""
    rows = [(*message[:4], message.body.decode(), *message[5:]) for message in messages]
    return _columns(rows, len(NewSagaMessage._fields))


def save_parameters(claim: Claim, turn: SagaChange, lease_seconds: float) -> list[Any]:
    """Return the parameters of `save`: the fence, instance, journal, messages, audit log, losses and data."""
    writes = SagaWriteSet.of(turn, lease_seconds)
    to = writes.instance
    *journal, data = _columns([entry_row(entry) for entry in writes.entries], ENTRY_COLUMNS)
    lines = [(each[2:10] + each[11:14]) for each in writes.lines]
    *audit, hashes = _columns(lines, LINE_COLUMNS)
    return [
        *(claim.saga_id, claim.worker, claim.epoch, to.version),
        *(to.state.decode(), to.status, to.current_step, writes.last_error, to.retry_count, to.needs_attention),
        *(turn.release, writes.due_seconds),
        *journal,
        *(writes.taken, writes.seen),
        *audit,
        to.losses,
        data,
        *(to.audit_lines, to.audit_hash, hashes, turn.keep_state),
    ]


def _columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """Return rows as columns, or empty columns without rows."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
