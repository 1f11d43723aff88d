"""Payloads: an invalid one is rejected with the path of the error, a valid one becomes its text."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from outrider import Event, InvalidEvent
from outrider.outbox.model import NewEvent
from outrider.outbox.validation import StagingRules, validate_events

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - its rejection is the point
AWARE = datetime(2030, 1, 1, tzinfo=UTC)
NAN, INFINITY = float("nan"), float("inf")
SURROGATE, NUL = "bad \ud800 text", "bad \0 text"


class Unknown:
    """A type JSON has never heard of."""


def stage(*events: Event, **rules: Any) -> list[NewEvent]:
    return validate_events(events, StagingRules(**rules)).plain


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        (NAN, "payload"),
        ({"price": NAN}, "payload.price"),
        ({"lines": [{"price": 1.5}, {"price": INFINITY}]}, "payload.lines[1].price"),
        ([1, -INFINITY], "payload[1]"),
        ({"price": Decimal("NaN")}, "payload.price"),
        ({"price": Decimal("sNaN")}, "payload.price"),
        ({"price": Decimal("-Infinity")}, "payload.price"),
        ({"name": NUL}, "payload.name"),
        ({"names": ["fine", NUL]}, "payload.names[1]"),
        ({"name": SURROGATE}, "payload.name"),
        ({"deep": {"er": (SURROGATE,)}}, "payload.deep.er[0]"),
        ({"\ud800": 1}, "payload.'\\ud800'"),
        ({"\0": 1}, "payload.'\\x00'"),
        ({"at": NAIVE}, "payload.at"),
        ({"range": [AWARE, NAIVE]}, "payload.range[1]"),
        ({"thing": Unknown()}, "payload.thing"),
        ({"raw": b"bytes"}, "payload.raw"),
        ({"some": {1, 2}}, "payload.some"),
        ({"map": {(1, 2): "tuple"}}, "payload.map"),
        (endless(), "payload" + ".again" * 201),
        (nested(3000), "payload" + "[0]" * 201),
    ],
)
def test_a_bad_payload_is_rejected_with_the_exact_path(payload: Any, path: str) -> None:
    with pytest.raises(InvalidEvent) as rejected:
        stage(Event("order.placed", payload))
    assert rejected.value.path == path
    assert str(rejected.value).startswith(f"{path}: ")


@pytest.mark.parametrize(("topic", "limit"), [("orders", 100), ("mails.eu", 20), ("mails.us", 20)])
def test_a_payload_too_large_for_its_destination_is_rejected(topic: str, limit: int) -> None:
    rules = {"payload_bytes_max": 100, "payload_bytes_max_by_topic": {"mails.*": 20}}
    exact = "é" * ((limit - 2) // 2)
    assert len(json.dumps(exact, ensure_ascii=False).encode()) == limit
    stage(Event("a", exact, topic=topic), **rules)
    with pytest.raises(InvalidEvent, match=f"the destination takes {limit}") as rejected:
        stage(Event("a", exact + "x", topic=topic), **rules)
    assert rejected.value.path == "payload"


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (None, "null"),
        ({}, "{}"),
        ([1, 2.5, True, None], "[1,2.5,true,null]"),
        ({"name": "blåbær 🫐"}, '{"name":"blåbær 🫐"}'),
        ({"id": UUID(int=7), "at": AWARE}, f'{{"id":"{UUID(int=7)}","at":"2030-01-01T00:00:00+00:00"}}'),
        ({"day": date(2030, 1, 2)}, '{"day":"2030-01-02"}'),
        ({"total": Decimal("12.50")}, '{"total":"12.50"}'),
        ({"big": 2**70}, f'{{"big":{2**70}}}'),
        ({"escaped": "\\u0000"}, '{"escaped":"\\\\u0000"}'),
    ],
)
def test_a_good_payload_becomes_its_text(payload: Any, text: str) -> None:
    assert stage(Event("a", payload))[0].payload == text
