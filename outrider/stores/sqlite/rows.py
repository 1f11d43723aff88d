"""Conversion between rows and records: shared column lists, times as seconds, events as tuples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any
from uuid import UUID

from outrider.event import SKIPPED_TYPE, OutboxRow
from outrider.outbox.model import CLAIM_SECONDS_MAX
from outrider.stores import queries

PACKAGE = "outrider.stores.sqlite"

_COPIED = (
    *("id", "event_id", "event_type", "aggregate_type", "aggregate_id", "payload", "headers", "topic", "key"),
    *("routing_key", "priority", "schema_version", "saga_id", "sequence", "max_attempts", "retry", "created_at"),
    *("available_at", "lane", "attempts", "failure"),
)

# In the order of OutboxRow's fields.
_EVENT = (
    *("id", "event_id", "event_type", "aggregate_type", "aggregate_id", "payload", "headers", "topic", "stream_key"),
    *("routing_key", "lane", "schema_version", "saga_id", "sequence", "max_attempts", "retry", "attempts", "state"),
    *("created_at", "available_at"),
)

_INBOX_EVENT = (
    *(
        "consumer",
        "event_id",
        "event_type",
        "topic",
        "key",
        "band",
        "sequence",
        "raw_key",
        "headers",
        "body",
        "partition",
    ),
    *("position", "replayed", "received_at"),
)

# In the order of Instance's fields.
_SAGA = (
    *("saga_id", "saga_type", "definition_version", "correlation_id", "state", "status", "current_step", "version"),
    *("last_error", "retry_count", "needs_attention", "traceparent", "started_at", "updated_at", "ended_at", "wake_at"),
    *("owner", "epoch", "fingerprint", "losses", "deadline_at", "parent_id", "parent_step", "audit_lines"),
    *("audit_hash", "subject"),
)

_READINESS = (
    "CASE WHEN outbox.state = 'optimistic' AND outbox.claimed_until > :now "
    f"AND outbox.claimed_until <= :now + {CLAIM_SECONDS_MAX:g} THEN 'optimistic' "
    "WHEN outbox.available_at > :now THEN 'early' ELSE 'ready' END"
)

_JSON = ("payload", "headers", "retry", "failure")
_TIMES = ("created_at", "available_at", "sent_at", "dead_lettered_at")


def _without(*names: str) -> str:
    return ", ".join(column for column in _COPIED if column not in names)


_CONSTANTS = {
    **queries.constants(),
    "event": ", ".join([*(f"outbox.{column}" for column in _EVENT), _READINESS, "outbox.suspect"]),
    "facts": ", ".join({"id": "id AS position", "key": "stream_key AS key"}.get(c, c) for c in _COPIED),
    "copied": ", ".join(_COPIED),
    "outbox_copied": ", ".join(f"outbox.{column}" for column in _COPIED),
    "copied_but_attempts": _without("attempts"),
    "copied_but_topic_attempts_failure": _without("topic", "attempts", "failure"),
    "copied_but_position_headers_attempts": _without("id", "headers", "attempts"),
    "inbox_event": ", ".join(_INBOX_EVENT),
    "inbox_event_but_replayed": ", ".join(_INBOX_EVENT[:-2]),
    "saga": ", ".join(_SAGA),
    "skipped_type": SKIPPED_TYPE,
}


@cache
def load() -> dict[str, str]:
    """Return the statements of the outbox by name."""
    return _load("outbox", "stage", "outbox_admin")


@cache
def load_inbox() -> dict[str, str]:
    """Return the statements of consumers by name."""
    return _load("inbox")


@cache
def load_saga() -> dict[str, str]:
    """Return the statements of sagas by name."""
    return _load("saga")


@cache
def load_operation_log() -> dict[str, str]:
    """Return the statements of the operation log by name."""
    return _load("saga", "operation_log")


@cache
def load_payload() -> dict[str, str]:
    """Return the statements of payloads by name."""
    return _load("payload")


@cache
def load_privacy() -> dict[str, str]:
    """Return the statements of keys and of reencryption by name."""
    return _load("privacy")


@cache
def load_journal() -> dict[str, str]:
    """Return the statements of the journal by name."""
    return _load("journal")


@cache
def load_erasure() -> dict[str, str]:
    """Return the statements of erasure by name, with pieces of those of sagas."""
    return _load("saga", "erasure")


def _load(*files: str) -> dict[str, str]:
    return queries.load(PACKAGE, [f"sql/{file}.sql" for file in files], _CONSTANTS)


def to_seconds(moment: datetime | None) -> float | None:
    """Return a time in the format of the tables."""
    return None if moment is None else moment.timestamp()


def to_moment(seconds: float | None) -> datetime | None:
    """Return a time from the tables.

    >>> to_moment(0.5).isoformat()
    '1970-01-01T00:00:00.500000+00:00'
    """
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def to_event(row: Sequence[Any]) -> OutboxRow:
    """Return the event of a row selected with the shared column list."""
    cells = list(row)
    cells[1] = UUID(cells[1])
    cells[5], cells[6] = cells[5].encode(), cells[6].encode()
    cells[15] = None if cells[15] is None else cells[15].encode()
    cells[18], cells[19] = datetime.fromtimestamp(cells[18], UTC), to_moment(cells[19])
    cells[21] = bool(cells[21])
    return OutboxRow._make(cells)


def to_facts(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return a row in readable form: JSON parsed, seconds as times."""
    facts = dict(zip(names, row, strict=True))
    facts["event_id"] = UUID(facts["event_id"])
    for name in _JSON:
        facts[name] = None if facts[name] is None else json.loads(facts[name])
    for name in _TIMES:
        if name in facts:
            facts[name] = to_moment(facts[name])
    return facts
