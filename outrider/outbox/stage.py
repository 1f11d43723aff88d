"""Staging, the pure part: events are checked and become drafts; a driver inserts them through the caller's connection.

Everything a database or a broker would choke on later is refused here, with the path of the bad field, before anything
is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any
from uuid import UUID

from outrider.backoff import RetryPolicy
from outrider.errors import InvalidEvent
from outrider.event import (
    EVENT_TYPE_BYTES_MAX,
    GAPLESS,
    TOPIC,
    TRACEPARENT,
    Event,
    band_of,
    default_topic,
    uuid7,
)
from outrider.outbox.payload import bad_characters, payload_text
from outrider.store import Draft, Drafts

TopicRule = Callable[[str, str | None, str | None], str]

_HEADER = re.compile(r"[A-Za-z0-9._\-]{1,100}")
_TRACE = {
    "traceparent": TRACEPARENT,
    "trace_id": re.compile(r"[0-9a-f]{32}"),
}
_TEXT_FIELDS = ("event_type", "aggregate_type", "aggregate_id", "key", "routing_key", "saga_id")
_YEARS = range(1900, 9000)
_TEXT_BYTES_MAX = {"event_type": EVENT_TYPE_BYTES_MAX}
_RESERVED = frozenset(
    {"message_id", "event_type", "key", "sequence", "schema_version", "skipped", "replayed", "band", "gapless", "topic"}
)


@dataclass(frozen=True, slots=True)
class StagingRules:
    """What may be staged, and where it goes.

    `payload_bytes_max_by_topic` maps topic patterns to the limit of that destination.

    >>> StagingRules(payload_bytes_max=1000).limit_of("orders")
    1000
    """

    topic_rule: TopicRule = default_topic
    payload_bytes_max: int = 1_000_000
    payload_bytes_max_by_topic: Mapping[str, int] = field(default_factory=dict)

    def limit_of(self, topic: str) -> int:
        """Return how large a payload for the topic may be."""
        found = (limit for pattern, limit in self.payload_bytes_max_by_topic.items() if fnmatchcase(topic, pattern))
        return next(found, self.payload_bytes_max)


def drafts(events: Sequence[Event], rules: StagingRules) -> Drafts:
    """Check events and prepare them for a driver; of two with the same id the first wins.

    >>> drafts([Event("order.placed", {})], StagingRules()).plain[0].topic
    'events.order.placed'
    """
    several = len(events) > 1
    made = [_draft(event, rules, f"events[{index}]." if several else "") for index, event in enumerate(events)]
    first = {
        draft.event_id: (draft, _counted(event)) for event, draft in reversed(list(zip(events, made, strict=True)))
    }
    chosen = [first[event_id] for event_id in dict.fromkeys(draft.event_id for draft in made)]
    plain = [draft for draft, counted in chosen if not counted]
    numbered = [draft for draft, counted in chosen if counted]
    _check_mixture(plain, numbered)
    supplied = any(event.event_id is not None for event in events)
    return Drafts(plain, numbered, supplied, tuple(draft.event_id for draft in made))


def _counted(event: Event) -> bool:
    # An event without a key is alone in its stream; there is nothing to count.
    return event.sequence == "auto" and (event.key is not None or event.aggregate_id is not None)


def _check_mixture(plain: list[Draft], numbered: list[Draft]) -> None:
    """A stream is numbered or it is not; with both in one call, neither order nor numbers would mean anything."""
    both = {_stream(draft) for draft in plain} & {_stream(draft) for draft in numbered} if numbered else set()
    if both:
        topic, key, _ = min(both)
        remedy = "use sequence='auto' for all events of a stream or for none"
        raise InvalidEvent("sequence", f"the stream of key {key!r} on {topic} is numbered for some events only", remedy)


def _stream(draft: Draft) -> tuple[str, str, int]:
    return draft.topic, draft.key or draft.aggregate_id or str(draft.event_id), band_of(draft.priority)


def _draft(event: Event, rules: StagingRules, at: str) -> Draft:
    _check_kind(event, at)
    _check_fields(event, at)
    topic = _topic(event, rules, at)
    return Draft(
        event_id=event.event_id or uuid7(),
        event_type=event.event_type,
        aggregate_type=event.aggregate_type,
        aggregate_id=event.aggregate_id,
        payload=payload_text(event.payload, rules.limit_of(topic), f"{at}payload"),
        headers=_headers(event, at),
        topic=topic,
        key=event.key,
        routing_key=event.routing_key,
        priority=int(event.priority),
        schema_version=event.schema_version,
        saga_id=event.saga_id,
        sequence=event.sequence if isinstance(event.sequence, int) else None,
        max_attempts=event.max_attempts,
        retry=json.dumps(event.retry.to_json()) if event.retry else None,
        created_at=event.created_at,
        available_at=event.available_at,
    )


def _check_kind(event: object, at: str) -> None:
    if not isinstance(event, Event):
        remedy = "unpack it: stage(conn, *events)" if isinstance(event, list | tuple) else "pass Event(...)"
        raise InvalidEvent(at.rstrip(".") or "event", f"a {type(event).__name__} is not an Event", remedy)


def _check_fields(event: Event, at: str) -> None:
    if event.event_id is not None and not isinstance(event.event_id, UUID):
        raise InvalidEvent(f"{at}event_id", f"{event.event_id!r} is not a UUID", "pass uuid.UUID(...)")
    for name in _TEXT_FIELDS:
        _check_text(getattr(event, name), f"{at}{name}", required=name == "event_type")
    _check_number(event.priority, 0, 9, f"{at}priority")
    _check_number(event.schema_version, 1, 2**31 - 1, f"{at}schema_version")
    if event.max_attempts is not None:
        _check_number(event.max_attempts, 1, 32_767, f"{at}max_attempts")
    if isinstance(event.sequence, str) and event.sequence != "auto":
        raise InvalidEvent(f"{at}sequence", f"{event.sequence!r} is not a sequence", 'use "auto" or a whole number')
    if event.sequence not in (None, "auto"):
        _check_number(event.sequence, 0, 2**63 - 1, f"{at}sequence")
    if event.retry is not None and not isinstance(event.retry, RetryPolicy):
        raise InvalidEvent(f"{at}retry", f"{event.retry!r} is no policy", "pass RetryPolicy(max_attempts=5), or None")
    for name in ("created_at", "available_at"):
        _check_time(getattr(event, name), f"{at}{name}")


def _check_text(value: Any, path: str, *, required: bool = False) -> None:
    if value is None and not required:
        return
    if not isinstance(value, str) or not value:
        raise InvalidEvent(path, f"{value!r} is not a text", "pass a string that is not empty")
    if problem := bad_characters(value):
        raise InvalidEvent(path, problem, "remove it")
    limit = _TEXT_BYTES_MAX.get(path.rpartition(".")[2], 1000)
    if (size := len(value.encode())) > limit:
        raise InvalidEvent(path, f"it has {size} bytes", f"use at most {limit}")


def _check_number(value: Any, lowest: int, highest: int, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidEvent(path, f"{value!r} is out of range", f"use a whole number from {lowest} to {highest}")


def _check_time(value: Any, path: str) -> None:
    if value is None:
        return
    if not isinstance(value, datetime):
        raise InvalidEvent(path, f"{value!r} is not a datetime", "pass an aware datetime")
    if value.utcoffset() is None:
        raise InvalidEvent(path, "it is a naive datetime", "give it a time zone, such as datetime.now(UTC)")
    if not _YEARS.start <= value.year < _YEARS.stop:
        raise InvalidEvent(path, f"the year {value.year} is out of range", f"use {_YEARS.start} to {_YEARS.stop - 1}")


def _topic(event: Event, rules: StagingRules, at: str) -> str:
    if event.topic is not None:
        _check_text(event.topic, f"{at}topic")
    topic = event.topic or rules.topic_rule(event.event_type, None, event.routing_key)
    if not TOPIC.fullmatch(topic) or topic in (".", ".."):
        remedy = "use letters, digits, '.', '_' and '-', at most 249"
        raise InvalidEvent(f"{at}topic", f"{topic!r} has characters a broker refuses", remedy)
    return topic


def _headers(event: Event, at: str) -> str:
    if not isinstance(event.headers, Mapping):
        raise InvalidEvent(f"{at}headers", f"{event.headers!r:.80} is no mapping", 'pass {"name": "value"}')
    for name, value in event.headers.items():
        path = f"{at}headers.{name}"
        if not _HEADER.fullmatch(str(name)):
            raise InvalidEvent(path, "the name has characters a broker refuses", "use letters, digits, '.', '_', '-'")
        if name in _RESERVED:
            raise InvalidEvent(path, "the name is filled in by outrider", "choose another")
        if not isinstance(value, str):
            raise InvalidEvent(path, f"{value!r} is not a text", "pass a string")
        if name in _TRACE and not _TRACE[name].fullmatch(value):
            raise InvalidEvent(path, f"{value!r} is not a W3C {name}", "pass it on as it came, or leave it out")
        problem = bad_characters(value) or ("it has a line break" if "\n" in value or "\r" in value else None)
        if problem:
            raise InvalidEvent(path, problem, "remove it")
    headers = {**event.headers, **(GAPLESS if _counted(event) else {})}
    return json.dumps(headers, ensure_ascii=False) if headers else "{}"
