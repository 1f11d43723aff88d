"""Validation at staging, without I/O: checks events and prepares rows, which a driver inserts through the connection.

Validation rejects all values that a database or a broker could not store, with the path of the bad field, before a row
is written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any
from uuid import UUID

from outrider.errors import InvalidEvent
from outrider.event import (
    ERASED_TEXT,
    EVENT_TYPE_BYTES_MAX,
    GAPLESS,
    SUBJECT_BYTES_MAX,
    SUBJECT_HEADER,
    TOPIC,
    TRACEPARENT,
    VERSION,
    Event,
    band_of,
    default_topic,
    subject_of,
    subject_problem,
    uuid7,
)
from outrider.outbox.model import DeadLetterEdit, NewEvent, StageRequest
from outrider.payload.conversion import is_model, is_object_id, to_plain
from outrider.payload.model import PayloadFacts
from outrider.payload.payloads import Payloads
from outrider.retry import RetryPolicy

TopicRule = Callable[[str, str | None, str | None], str]

_HEADER = re.compile(r"[A-Za-z0-9._\-]{1,100}")

_TRACE = {
    "traceparent": TRACEPARENT,
    "trace_id": re.compile(r"[0-9a-f]{32}"),
}

_TEXT_FIELDS = ("event_type", "aggregate_type", "aggregate_id", "key", "routing_key", "saga_id")

_ID_FIELDS = ("aggregate_id", "key", "saga_id", "subject")

_YEARS = range(1900, 9000)

_TEXT_BYTES_MAX = {"event_type": EVENT_TYPE_BYTES_MAX}

_RESERVED = frozenset(
    {"message_id", "event_type", "key", "sequence", "schema_version", "skipped", "replayed", "band", "gapless", "topic"}
)

_DEPTH_MAX = 200


@dataclass(frozen=True, slots=True)
class StagingRules:
    """The limits of staged events, and their topic rule.

    `payload_bytes_max_by_topic` maps topic patterns to a size limit. `payloads` checks and encrypts payloads.

    >>> StagingRules(payload_bytes_max=1000).limit_of("orders")
    1000
    """

    topic_rule: TopicRule = default_topic
    payload_bytes_max: int = 1_000_000
    payload_bytes_max_by_topic: Mapping[str, int] = field(default_factory=dict)
    payloads: Payloads | None = None

    def limit_of(self, topic: str) -> int:
        """Return the maximal payload size for the topic, in bytes."""
        found = (limit for pattern, limit in self.payload_bytes_max_by_topic.items() if fnmatchcase(topic, pattern))
        return next(found, self.payload_bytes_max)


async def load_schemas(rules: StagingRules, events: Sequence[Event]) -> None:
    """Read the schemas and keys of events that are not in memory: a source may be slow, and the loop must not wait.

    ```python
    await load_schemas(rules, events)
    request = validate_events(events, rules)
    ```
    """
    if (payloads := rules.payloads) is not None:
        # `validate_events` rejects whatever is no event, and whatever is no subject.
        known = [event for event in events if hasattr(event, "event_type")]
        pairs = [(each.event_type, each.schema_version) for each in known] if payloads.checks_at_staging else []
        named = [(each.event_type, subject_of(each)) for each in known]
        subjects = [(name, subject) for name, subject in named if subject and not subject_problem(subject)]
        await payloads.load(pairs, subjects=subjects)


def validate_events(events: Sequence[Event], rules: StagingRules) -> StageRequest:
    """Check events and prepare them for a driver; with a duplicate id, the first event wins.

    >>> validate_events([Event("order.placed", {})], StagingRules()).plain[0].topic
    'events.order.placed'
    """
    several = len(events) > 1
    prepared = [_prepare(event, rules, f"events[{index}]." if several else "") for index, event in enumerate(events)]
    first = {
        new.event_id: (new, _is_numbered(event)) for event, new in reversed(list(zip(events, prepared, strict=True)))
    }
    chosen = [first[event_id] for event_id in dict.fromkeys(new.event_id for new in prepared)]
    plain = [new for new, counted in chosen if not counted]
    numbered = [new for new, counted in chosen if counted]
    _check_numbering(plain, numbered)
    supplied = any(event.event_id is not None for event in events)
    return StageRequest(plain, numbered, supplied, tuple(new.event_id for new in prepared))


def validate_edit(
    dead_letter: Mapping[str, Any],
    rules: StagingRules,
    *,
    payload: str | None = None,
    headers: Mapping[str, str] | None = None,
    topic: str | None = None,
) -> DeadLetterEdit:
    """Check changes to a dead letter by the rules of staging; `payload` is JSON text.

    >>> validate_edit({"event_type": "paid", "topic": "orders"}, StagingRules(), payload='{"total": 12}').payload
    '{"total":12}'
    """
    try:
        content = None if payload is None else json.loads(payload)
    except ValueError as error:
        raise InvalidEvent("payload", f"it is not JSON ({error})", "pass one JSON value") from error
    kept = {name: dead_letter[name] for name in ("event_id", "schema_version", "key") if dead_letter.get(name)}
    own, stored = dict(headers or {}), (dead_letter.get("headers") or {}).get(SUBJECT_HEADER)
    if payload is None and stored is not None and own.get(SUBJECT_HEADER, stored) != stored:
        problem = "the encrypted values of the payload belong to the subject that the event has"
        raise InvalidEvent(f"headers.{SUBJECT_HEADER}", problem, "pass the payload as well")
    bound = {SUBJECT_HEADER: stored, **own} if isinstance(stored, str) else own
    changed = Event(dead_letter["event_type"], content, headers=bound, topic=topic or dead_letter["topic"], **kept)
    new = _prepare(changed, rules if payload is not None else replace(rules, payloads=None), "")
    return DeadLetterEdit(None if payload is None else new.payload, own, topic and new.topic)


def _is_numbered(event: Event) -> bool:
    # An event without a key is alone in its stream, and needs no number.
    return event.sequence == "auto" and (event.key is not None or event.aggregate_id is not None)


def _check_numbering(plain: list[NewEvent], numbered: list[NewEvent]) -> None:
    """Reject a stream with numbered and unnumbered events in the same call: order and numbers would have no meaning."""
    both = {_stream(new) for new in plain} & {_stream(new) for new in numbered} if numbered else set()
    if both:
        topic, key, _ = min(both)
        remedy = "use sequence='auto' for all events of a stream or for none"
        raise InvalidEvent("sequence", f"the stream of key {key!r} on {topic} is numbered for some events only", remedy)


def _stream(new: NewEvent) -> tuple[str, str, int]:
    return new.topic, new.key or new.aggregate_id or str(new.event_id), band_of(new.priority)


def _prepare(event: Event, rules: StagingRules, prefix: str) -> NewEvent:
    _check_kind(event, prefix)
    event = _with_text_ids(event)
    _check_fields(event, prefix)
    topic, event_id = _topic(event, rules, prefix), event.event_id or uuid7()
    text, headers = payload_text(event.payload, rules.limit_of(topic), f"{prefix}payload"), _headers(event, prefix)
    if text == ERASED_TEXT:
        problem = "it is what an erasure leaves of a payload, and no consumer handles it"
        raise InvalidEvent(f"{prefix}payload", problem, "stage another value")
    if rules.payloads is not None:
        key = event.key or event.aggregate_id
        facts = PayloadFacts(event_id, event.event_type, event.schema_version, topic, key, subject_of(event))
        stored = rules.payloads.stage(facts, text, f"{prefix}payload")
        text = text if stored is text else _checked_size(stored, rules, topic, prefix)
    return NewEvent(
        event_id=event_id,
        event_type=event.event_type,
        aggregate_type=event.aggregate_type,
        aggregate_id=event.aggregate_id,
        payload=text,
        headers=headers,
        topic=topic,
        key=event.key,
        routing_key=event.routing_key,
        priority=int(event.priority),
        schema_version=str(event.schema_version),
        saga_id=event.saga_id,
        sequence=event.sequence if isinstance(event.sequence, int) else None,
        max_attempts=event.max_attempts,
        retry=json.dumps(event.retry.to_json()) if event.retry else None,
        created_at=event.created_at,
        available_at=event.available_at,
    )


def _checked_size(text: str, rules: StagingRules, topic: str, prefix: str) -> str:
    """Return a payload that `Payloads` has accepted; encrypted values are longer than plain ones."""
    limit = rules.limit_of(topic)
    if (size := len(text.encode())) > limit:
        problem = f"it has {size} bytes once encrypted, the destination takes {limit}"
        raise InvalidEvent(f"{prefix}payload", problem, "stage a reference to it instead")
    return text


def _check_kind(event: object, prefix: str) -> None:
    if not isinstance(event, Event):
        remedy = "unpack it: stage(conn, *events)" if isinstance(event, list | tuple) else "pass Event(...)"
        raise InvalidEvent(prefix.rstrip(".") or "event", f"a {type(event).__name__} is not an Event", remedy)


def _with_text_ids(event: Event) -> Event:
    """Return the event with ids as text: an application's ids may be whole numbers, UUIDs or ObjectIds."""
    found = {name: getattr(event, name) for name in _ID_FIELDS}
    changed: dict[str, Any] = {name: str(value) for name, value in found.items() if _is_id(value)}
    return replace(event, **changed) if changed else event


def _is_id(value: Any) -> bool:
    return (isinstance(value, int | UUID) and not isinstance(value, bool)) or is_object_id(value)


def _check_fields(event: Event, prefix: str) -> None:
    if event.event_id is not None and not isinstance(event.event_id, UUID):
        raise InvalidEvent(f"{prefix}event_id", f"{event.event_id!r} is not a UUID", "pass uuid.UUID(...)")
    for name in _TEXT_FIELDS:
        _check_text(getattr(event, name), f"{prefix}{name}", required=name == "event_type")
    _check_number(event.priority, 0, 9, f"{prefix}priority")
    if isinstance(event.schema_version, bool) or not VERSION.fullmatch(str(event.schema_version)):
        remedy = "use a whole number from 1, or a text such as 2.1.0"
        raise InvalidEvent(f"{prefix}schema_version", f"{event.schema_version!r} is no version", remedy)
    if event.max_attempts is not None:
        _check_number(event.max_attempts, 1, 32_767, f"{prefix}max_attempts")
    if isinstance(event.sequence, str) and event.sequence != "auto":
        raise InvalidEvent(f"{prefix}sequence", f"{event.sequence!r} is not a sequence", 'use "auto" or a whole number')
    if event.sequence not in (None, "auto"):
        _check_number(event.sequence, 0, 2**63 - 1, f"{prefix}sequence")
    if event.retry is not None and not isinstance(event.retry, RetryPolicy):
        raise InvalidEvent(
            f"{prefix}retry", f"{event.retry!r} is no policy", "pass RetryPolicy(max_attempts=5), or None"
        )
    for name in ("created_at", "available_at"):
        _check_time(getattr(event, name), f"{prefix}{name}")


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


def _topic(event: Event, rules: StagingRules, prefix: str) -> str:
    if event.topic is not None:
        _check_text(event.topic, f"{prefix}topic")
    topic = event.topic or rules.topic_rule(event.event_type, None, event.routing_key)
    if not TOPIC.fullmatch(topic) or topic in (".", ".."):
        remedy = "use letters, digits, '.', '_' and '-', at most 249"
        raise InvalidEvent(f"{prefix}topic", f"{topic!r} has characters that brokers reject", remedy)
    return topic


def _headers(event: Event, prefix: str) -> str:
    if not isinstance(event.headers, Mapping):
        raise InvalidEvent(f"{prefix}headers", f"{event.headers!r:.80} is no mapping", 'pass {"name": "value"}')
    for name, value in event.headers.items():
        path = f"{prefix}headers.{name}"
        if not _HEADER.fullmatch(str(name)):
            raise InvalidEvent(
                path, "the name has characters that brokers reject", "use letters, digits, '.', '_', '-'"
            )
        if name in _RESERVED:
            raise InvalidEvent(path, "the name is reserved for outrider", "choose another")
        if not isinstance(value, str):
            raise InvalidEvent(path, f"{value!r} is not a text", "pass a string")
        if name in _TRACE and not _TRACE[name].fullmatch(value):
            raise InvalidEvent(path, f"{value!r} is not a W3C {name}", "pass it on unchanged, or leave it out")
        problem = bad_characters(value) or ("it has a line break" if "\n" in value or "\r" in value else None)
        if problem:
            raise InvalidEvent(path, problem, "remove it")
    headers = {**event.headers, **(GAPLESS if _is_numbered(event) else {}), **_subject(event, prefix)}
    return json.dumps(headers, ensure_ascii=False) if headers else "{}"


def _subject(event: Event, prefix: str) -> dict[str, str]:
    """Return the header of the subject. Two different subjects would leave open whose data the event carries."""
    in_header = event.headers.get(SUBJECT_HEADER)
    if event.subject is not None and in_header not in (None, event.subject):
        reason = f"it is {in_header!r}, and the event has the subject {event.subject!r}"
        raise InvalidEvent(f"{prefix}headers.{SUBJECT_HEADER}", reason, "leave the header out")
    if (subject := subject_of(event)) is None:
        return {}
    path = f"{prefix}subject" if event.subject is not None else f"{prefix}headers.{SUBJECT_HEADER}"
    if not isinstance(event.subject, str | None):
        raise InvalidEvent(path, f"{event.subject!r} is not a text", "pass a string that is not empty")
    if problem := subject_problem(subject):
        raise InvalidEvent(path, problem, f"use 1 to {SUBJECT_BYTES_MAX} bytes of text without control characters")
    return {SUBJECT_HEADER: subject}


def bad_characters(text: str) -> str | None:
    """Return a description of the first character that databases or brokers reject, None if there is none."""
    if "\0" in text:
        return "it contains a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "it contains a lone surrogate"
    return None


def payload_text(payload: Any, bytes_max: int, path: str) -> str:
    """Return the payload as JSON text; reject an invalid payload with the path of the bad value.

    >>> payload_text({"total": 12}, 100, "payload")
    '{"total":12}'
    """
    try:
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, default=to_plain, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise next(
            _find_problems(payload, path), InvalidEvent(path, f"it is not JSON ({error})", "pass JSON values")
        ) from error
    if "\\u0000" in text:
        for problem in _find_problems(payload, path):
            raise problem
    if size > bytes_max:
        raise InvalidEvent(
            path, f"it has {size} bytes, the destination takes {bytes_max}", "stage a reference to it instead"
        )
    return text


def _find_problems(value: Any, path: str, depth: int = 0) -> Iterator[InvalidEvent]:
    """Walk a rejected payload to find the path and the reason of the error. Runs only after a failure."""
    if depth > _DEPTH_MAX:
        yield InvalidEvent(path, "it is nested too deeply or contains itself", "flatten it")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _find_key_problems(name, path)
            yield from _find_problems(item, f"{path}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _find_problems(item, f"{path}[{index}]", depth + 1)
    elif problem := _problem(value):
        yield InvalidEvent(path, *problem)
    elif is_model(value) or isinstance(value, Enum):
        yield from _find_problems(to_plain(value), path, depth + 1)


def _problem(value: Any) -> tuple[str, str] | None:
    """Return the problem of a single value, and the remedy."""
    if isinstance(value, str):
        bad = bad_characters(value)
        return (bad, "remove it") if bad else None
    if isinstance(value, float | Decimal):
        finite = value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)
        return None if finite else (f"{value} is not JSON", "send null or a number")
    if isinstance(value, datetime) and value.utcoffset() is None:
        return "it is a naive datetime", "give it a time zone, such as datetime.now(UTC)"
    if isinstance(value, bool | int | None | date | time | UUID | Enum) or is_model(value) or is_object_id(value):
        return None
    return f"a {type(value).__name__} is not JSON", "convert it to text, number, list or object"


def _find_key_problems(name: Any, path: str) -> Iterator[InvalidEvent]:
    if not isinstance(name, str):
        yield InvalidEvent(path, f"the key {name!r} is not a text", "use strings as keys")
    elif problem := bad_characters(name):
        yield InvalidEvent(f"{path}.{name!a}", problem, "remove it")
