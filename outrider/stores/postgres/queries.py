"""The PostgreSQL store's named statements, with the lists of columns they share."""

from __future__ import annotations

from functools import cache

from outrider.event import SKIPPED_TYPE
from outrider.stores import queries

_PACKAGE = "outrider.stores.postgres"
_FILES = ("lanes", "fetch", "settle", "stage", "desk", "upkeep")

_DRAFT = {
    "event_id": "uuid",
    "event_type": "text",
    "aggregate_type": "text",
    "aggregate_id": "text",
    "payload": "text",
    "headers": "text",
    "topic": "text",
    "key": "text",
    "routing_key": "text",
    "priority": "smallint",
    "schema_version": "integer",
    "saga_id": "text",
    "sequence": "bigint",
    "max_attempts": "smallint",
    "retry": "text",
    "created_at": "timestamptz",
    "available_at": "timestamptz",
}
_JSON = ("payload", "headers", "retry")
# The number comes last, because one statement takes it from the draft and the other counts it.
_STAGED = (*(name for name in _DRAFT if name != "sequence"), "sequence")
_ARCHIVE = (
    "id, event_id, event_type, aggregate_type, aggregate_id, payload, headers, topic, {key}, routing_key, priority, "
    "schema_version, saga_id, sequence, attempts, created_at, {sent_at}"
)
_STREAM_KEY = "coalesce({o}key, {o}aggregate_id, {o}event_id::text)"


@cache
def load(schema: str) -> dict[str, str]:
    """Return every statement by name.

    >>> load("outrider")["release"].startswith("UPDATE outrider.outbox_lane")
    True
    """
    known = constants(schema)
    return {name: sql for file in _FILES for name, sql in queries.load(_PACKAGE, f"sql/{file}.sql", known).items()}


def constants(schema: str, lanes: int = 0) -> dict[str, str]:
    """Return what the `.sql` files may refer to."""
    shared = queries.constants(schema)
    clock = f"(SELECT {schema}.outbox_clock())"
    key = _STREAM_KEY.format(o="o.")
    held = f"(o.state = 'optimistic' AND o.held_until > {clock})"
    return {
        **shared,
        "lanes": str(lanes),
        "skipped_type": SKIPPED_TYPE,
        "held": held,
        "event_columns": _event_columns(key, held, clock),
        "event_facts": f"o.*, {key} AS stream_key",
        "archive_columns": _ARCHIVE.format(key="key", sent_at="sent_at"),
        "gone_columns": _ARCHIVE.format(key=_STREAM_KEY.format(o=""), sent_at=f"{schema}.outbox_clock()"),
        "dead_columns": ", ".join(("id", *_DRAFT, "lane", "attempts", "reason", "failure", "policy", "buried_at")),
        "waiting_rows": f"SELECT FROM {schema}.outbox AS o WHERE o.lane = b.lane AND o.topic = b.topic "
        f"AND {key} = b.key AND o.state IN ({shared['waiting']})",
        **_staging(schema, shared["fetchable"]),
    }


def _event_columns(key: str, held: str, clock: str) -> str:
    """The columns of a StagedEvent, in its order."""
    return (
        "o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.payload, o.headers, o.topic, "
        f"{key} AS key, o.routing_key, o.lane, o.schema_version, o.saga_id, o.sequence, o.max_attempts, o.retry, "
        "o.attempts, o.state, o.created_at, o.available_at, "
        f"CASE WHEN {held} THEN 'held' WHEN o.available_at > {clock} THEN 'early' ELSE 'ready' END AS readiness, "
        "coalesce(o.failure ->> 'kind' = 'unresolved', false) AS suspect"
    )


def _staging(schema: str, fetchable: str) -> dict[str, str]:
    arrays = ", ".join(f"${n}::{kind}[]" for n, kind in enumerate(_DRAFT.values(), start=1))
    values = [f"g.{name}::json" if name in _JSON else f"g.{name}" for name in _STAGED if name != "sequence"]
    values[_STAGED.index("created_at")] = f"coalesce(g.created_at, {schema}.outbox_clock())"
    key = _STREAM_KEY.format(o="g.")
    # Asked only if there is a holder: an event may be held by its writer when nothing undelivered lies before it.
    quiet = f"""CROSS JOIN LATERAL (SELECT $18::text IS NOT NULL AND NOT EXISTS (
        SELECT FROM {schema}.outbox AS o
        WHERE o.lane = {schema}.outbox_lane_of({key}, g.priority) AND o.state IN ({fetchable}))
    AND NOT EXISTS (
        SELECT FROM {schema}.outbox_blocked AS b
        WHERE b.lane = {schema}.outbox_lane_of({key}, g.priority) AND b.topic = g.topic AND b.key = {key})
    AS quiet) AS q"""
    return {
        "draft_columns": ", ".join(_STAGED),
        "draft_values": ", ".join(values),
        "drafts": f"unnest({arrays}) WITH ORDINALITY AS g ({', '.join(_DRAFT)}, ord)",
        "quiet": quiet,
        "staged_state": "CASE WHEN q.quiet THEN 'optimistic' ELSE 'pending' END, CASE WHEN q.quiet THEN $18 END, "
        f"CASE WHEN q.quiet THEN {schema}.outbox_clock() + $19::float8 * interval '1 second' END",
        "dead_draft": ", ".join(_STAGED),
        "replayed_draft": ", ".join(_STAGED).replace("headers", """(headers::jsonb || '{"replayed": "true"}')::json"""),
    }
