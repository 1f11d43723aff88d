"""Encoding: every header a consumer may rely on is there, and the same each time."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from outrider.event import Message
from outrider.wire import REQUIRED_HEADERS, encode
from tests.support.outbox_rows import staged

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01"


def encoded(headers: dict[str, Any] | None = None, **changes: Any) -> Message:
    return encode(staged(1, headers=json.dumps(headers or {}).encode(), **changes), "orders")


@pytest.mark.parametrize("headers", [{}, {"tenant": "x"}, {"traceparent": GIVEN}, {"trace_id": TRACE}])
def test_required_headers_are_always_there(headers: dict[str, str]) -> None:
    found = encoded(headers).headers
    assert all(found[name] for name in REQUIRED_HEADERS)
    assert all(isinstance(value, str) for value in found.values())


@pytest.mark.parametrize("headers", [{}, {"tenant": "x"}, {"trace_id": TRACE}])
def test_a_traceparent_is_never_invented(headers: dict[str, str]) -> None:
    assert "traceparent" not in encoded(headers).headers


@pytest.mark.parametrize("microsecond", [0, 1, 999, 1000, 123_456, 999_999])
@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=5, minutes=30))])
def test_the_time_is_written_as_python_writes_it(microsecond: int, zone: timezone) -> None:
    for at in (datetime(1900, 1, 2, 3, 4, 5, microsecond, zone), datetime(8999, 12, 31, 23, 59, 59, microsecond, zone)):
        assert encoded(created_at=at).headers["created_at"] == at.isoformat()


def test_a_second_publish_carries_the_same_message() -> None:
    assert encoded({"tenant": "x"}, saga_id="s") == encoded({"tenant": "x"}, saga_id="s")


def test_two_events_never_share_what_identifies_them() -> None:
    one, other = encode(staged(1), "orders"), encode(staged(2), "orders")
    for name in REQUIRED_HEADERS:
        assert one.headers[name] != other.headers[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("traceparent", GIVEN),
        ("trace_id", TRACE),
        ("correlation_id", "order-7"),
        ("causation_id", "click-3"),
        ("tenant", "blå"),
    ],
)
def test_a_header_that_was_given_is_kept(name: str, value: str) -> None:
    assert encoded({name: value}).headers[name] == value


def test_a_given_trace_is_continued() -> None:
    assert encoded({"traceparent": GIVEN}).headers["trace_id"] == TRACE


def test_the_message_id_is_always_the_events_own() -> None:
    event = staged(1)
    message = encode(event._replace(headers=b'{"message_id": "forged"}'), "orders")
    assert message.message_id == message.headers["message_id"] == str(event.event_id)


def test_a_saga_correlates_its_events() -> None:
    found = encoded(saga_id="saga-1").headers
    assert found["saga_id"] == found["correlation_id"] == "saga-1"


def test_what_the_event_says_of_itself_travels_with_it() -> None:
    found = encoded(sequence=7, aggregate_type="order", aggregate_id="A-1", schema_version="3").headers
    expected = {"sequence": "7", "aggregate_type": "order", "aggregate_id": "A-1", "schema_version": "3", "key": "A"}
    assert {name: found[name] for name in expected} == expected


def test_what_an_event_does_not_have_makes_no_header() -> None:
    assert not {"sequence", "aggregate_type", "aggregate_id", "saga_id"} & set(encoded().headers)


def test_the_payload_travels_as_the_database_holds_it() -> None:
    assert encoded(payload=b'{"b":1, "a":2}').body == b'{"b":1, "a":2}'


def test_the_stream_decides_the_topic() -> None:
    message = encode(staged(1, topic=None, routing_key="r"), "events.order.placed")
    assert (message.topic, message.key, message.routing_key) == ("events.order.placed", "A", "r")
