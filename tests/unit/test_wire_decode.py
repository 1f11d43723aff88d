"""Decoding deliveries: an encoded event comes back, and a malformed one has a reason and keeps its position."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from outrider.event import BAND_NAMES, GAPLESS, SKIPPED_TYPE, Delivery, InboxStream, Message, Priority
from outrider.wire import decode, encode
from tests.support.outbox_rows import staged

GOOD = {"message_id": str(UUID(int=7, version=4)), "event_type": "order.placed", "key": "A"}


def delivered(message: Message, position: str = "orders/0/1") -> Delivery:
    headers = {name: text.encode() for name, text in message.headers.items()}
    return Delivery(message.topic, message.key.encode(), message.body, headers, "orders/0#1", position)


def raw(
    body: bytes = b"{}", *, wire_key: bytes | None = b"A", position: str = "orders/0/1", **headers: Any
) -> Delivery:
    """Make a delivery whose headers are good but for these; None leaves one out."""
    said = {name: text for name, text in {**GOOD, **headers}.items() if text is not None}
    encoded = {name: text if isinstance(text, bytes) else str(text).encode() for name, text in said.items()}
    return Delivery("orders", wire_key, body, encoded, position=position)


@pytest.mark.parametrize("band", BAND_NAMES)
def test_an_encoded_event_comes_back(band: str) -> None:
    event = staged(
        3,
        "A-1",
        payload=json.dumps({"total": 12, "odd": "naïve ☂"}).encode(),
        aggregate_type="order",
        aggregate_id="A-1",
        saga_id="saga-9",
        schema_version="4",
        sequence=17,
        headers=json.dumps({**GAPLESS, "trace_id": "0" * 31 + "1", "shop": "Zürich"}).encode(),
    )
    opened = decode(delivered(encode(event, "orders", band)))
    assert opened.problem == ""
    assert opened.event is not None
    found = opened.event
    assert (found.event_id, found.event_type, found.payload) == (
        event.event_id,
        event.event_type,
        {"total": 12, "odd": "naïve ☂"},
    )
    assert (found.aggregate_type, found.aggregate_id, found.saga_id) == ("order", "A-1", "saga-9")
    assert (found.schema_version, found.sequence, found.created_at) == (4, 17, event.created_at)
    assert (found.topic, found.key) == ("orders", "A-1")
    assert found.priority == {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}[band]
    assert found.headers["shop"] == "Zürich"
    assert opened.stream == InboxStream("orders", "A-1", BAND_NAMES.index(band))
    assert (opened.sequence, opened.keyed, opened.gapless, opened.replayed, opened.skipped) == (
        17,
        True,
        True,
        False,
        False,
    )


def test_an_event_without_extras_comes_back() -> None:
    opened = decode(delivered(encode(staged(1), "orders")))
    assert opened.problem == ""
    assert opened.event is not None
    assert (opened.event.aggregate_type, opened.event.sequence, opened.gapless) == (None, None, False)


@pytest.mark.parametrize(
    ("delivery", "problem"),
    [
        (raw(message_id=None), "header message_id: missing"),
        (raw(message_id=""), "header message_id: missing"),
        (raw(message_id="7"), "header message_id: not a UUID"),
        (raw(event_type=None), "header event_type: missing"),
        (raw(event_type="x" * 401), "event_type: longer than 400 bytes"),
        (raw(event_type="a\0b"), "event_type: holds a NUL character"),
        (raw(wire_key=b"\xff", key=None), "key: not UTF-8"),
        (raw(key="x" * 1001), "key: longer than 1000 bytes"),
        (raw(key="a\0b"), "key: holds a NUL character"),
        (raw(band="urgent"), "header band: none of high, normal, low"),
        (raw(sequence="-1"), "header sequence: not a whole number"),
        (raw(sequence="1.5"), "header sequence: not a whole number"),
        (raw(sequence="٣"), "header sequence: not a whole number"),
        (raw(sequence=2**63), "header sequence: not a whole number"),
        (raw(schema_version="two"), "header schema_version: not a whole number"),
        (raw(schema_version="2.1"), "header schema_version: not a whole number"),
        (raw(created_at="yesterday"), "header created_at: not a time"),
        (raw(created_at="2030-01-01T00:00:00"), "header created_at: without a time zone"),
        (raw(odd=b"\xff\xfe"), "header 'odd': not UTF-8"),
        (raw(outrider_unreadable="a name is not UTF-8"), "headers: a name is not UTF-8"),
        (raw(b"{"), "body: not JSON (JSONDecodeError)"),
        (raw(b""), "body: not JSON (JSONDecodeError)"),
        (raw(b"\xff"), "body: not JSON (UnicodeDecodeError)"),
        (raw(b'{"price": NaN}'), "body: NaN is not JSON"),
        (raw(b"[" * 100_000), "body: not JSON (RecursionError)"),
    ],
)
def test_a_malformed_message_has_a_reason(delivery: Delivery, problem: str) -> None:
    opened = decode(delivery)
    assert opened.event is None
    assert opened.problem == problem
    assert opened.delivery == delivery


def test_a_malformed_message_keeps_its_position_in_its_stream() -> None:
    opened = decode(raw(b"{", sequence=5, gapless="true", band="high"))
    assert opened.event_id == UUID(GOOD["message_id"])
    assert (opened.stream, opened.sequence, opened.gapless, opened.keyed) == (
        InboxStream("orders", "A", 0),
        5,
        True,
        True,
    )


def test_a_problem_never_quotes_the_payload() -> None:
    assert "secret" not in decode(raw(b'{"password": secret}')).problem


def test_a_message_without_an_id_is_recognised_by_its_position_its_key_and_its_body() -> None:
    message = raw(message_id=None)
    others = [
        message._replace(position="orders/0/2"),
        message._replace(key=b"B"),
        message._replace(key=None),
        message._replace(body=b"[]"),
    ]
    ids = {decode(other).event_id for other in others}
    assert decode(message).event_id == decode(message).event_id
    assert len(ids - {decode(message).event_id}) == len(others)


def test_a_message_with_neither_id_nor_position_is_unique() -> None:
    first, second = (decode(raw(message_id=None, position="")) for _ in range(2))
    assert first.event_id != second.event_id


def test_the_key_of_the_header_counts_before_that_of_the_wire() -> None:
    assert decode(raw(wire_key=b"B")).stream.key == "A"
    assert decode(raw(wire_key=b"B", key=None)).stream.key == "B"


@pytest.mark.parametrize("wire_key", [None, b""])
def test_a_message_without_a_key_is_a_stream_of_its_own(wire_key: bytes | None) -> None:
    opened = decode(raw(wire_key=wire_key, key=None))
    assert opened.problem == ""
    assert not opened.keyed
    assert opened.stream.key == str(opened.event_id)
    assert opened.event is not None
    assert opened.event.key == str(opened.event_id)


def test_any_json_is_a_payload() -> None:
    for text, value in ((b"null", None), (b"[1, 2]", [1, 2]), (b'"text"', "text"), (b"1e3", 1000.0)):
        opened = decode(raw(text))
        assert opened.event is not None
        assert opened.event.payload == value


def test_marks_of_the_relay_are_read() -> None:
    marker = decode(raw(event_type=SKIPPED_TYPE, sequence=4))
    assert (marker.skipped, marker.sequence) == (True, 4)
    replayed = decode(raw(replayed="true"))
    assert (replayed.replayed, replayed.skipped, replayed.event_type) == (True, False, "order.placed")
