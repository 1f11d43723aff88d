"""Validation of events: everything that a database or a broker would reject later is rejected, with its path."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest

from outrider import Event, InvalidEvent, Priority, RetryPolicy
from outrider.outbox.model import NewEvent
from outrider.outbox.validation import StagingRules, validate_events

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - its rejection is the point
AWARE = datetime(2030, 1, 1, tzinfo=UTC)
NAN = float("nan")
SURROGATE, NUL = "bad \ud800 text", "bad \0 text"


def stage(*events: Event, **rules: Any) -> list[NewEvent]:
    staged = validate_events(events, StagingRules(**rules))
    return [*staged.plain, *staged.numbered]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("event_id", "not-a-uuid"),
        ("aggregate_type", ""),
        ("aggregate_id", 7.5),
        ("aggregate_id", NUL),
        ("key", ""),
        ("key", SURROGATE),
        ("key", "k" * 1001),
        ("routing_key", NUL),
        ("saga_id", SURROGATE),
        ("priority", 10),
        ("priority", -1),
        ("priority", True),
        ("priority", 5.0),
        ("schema_version", 0),
        ("schema_version", "1.2"),
        ("sequence", -1),
        ("sequence", 2**63),
        ("sequence", "manual"),
        ("max_attempts", 0),
        ("max_attempts", 32_768),
        ("created_at", NAIVE),
        ("created_at", "2030-01-01"),
        ("available_at", NAIVE),
        ("available_at", date(2030, 1, 1)),
        ("topic", ""),
        ("topic", "orders/eu"),
        ("topic", "två"),
        ("topic", "with space"),
        ("topic", "with\nbreak"),
        ("topic", "."),
        ("topic", ".."),
        ("topic", "t" * 250),
        ("topic", NUL),
        ("topic", SURROGATE),
    ],
)
def test_a_bad_field_is_rejected_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidEvent) as rejected:
        stage(Event("order.placed", {}, **{field: value}))
    assert rejected.value.path == field


@pytest.mark.parametrize("event_type", ["", None, NUL, SURROGATE, "e" * 241])
def test_an_event_needs_a_proper_type(event_type: Any) -> None:
    with pytest.raises(InvalidEvent) as rejected:
        stage(Event(event_type, {}))
    assert rejected.value.path == "event_type"


def test_a_topic_made_from_a_bad_type_is_rejected_as_topic() -> None:
    with pytest.raises(InvalidEvent) as rejected:
        stage(Event("order placed", {}))
    assert rejected.value.path == "topic"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("with space", "x"),
        ("", "x"),
        ("colon:", "x"),
        ("break\n", "x"),
        ("å", "x"),
        ("n" * 101, "x"),
        ("message_id", "forged"),
        ("sequence", "1"),
        ("skipped", "x"),
        ("replayed", "true"),
        ("tenant", 7),
        ("tenant", None),
        ("tenant", NUL),
        ("tenant", SURROGATE),
        ("tenant", "two\nlines"),
        ("tenant", "two\rlines"),
    ],
)
def test_a_bad_header_is_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidEvent) as rejected:
        stage(Event("order.placed", {}, headers={name: value}))
    assert rejected.value.path == f"headers.{name}"


@pytest.mark.parametrize("field", ["headers", "retry"])
@pytest.mark.parametrize("value", [[("a", "b")], "x", 5])
def test_headers_that_are_no_mapping_and_a_retry_that_is_no_policy_are_rejected(field: str, value: Any) -> None:
    with pytest.raises(InvalidEvent) as rejected:
        stage(Event("order.placed", {}, **{field: value}))
    assert rejected.value.path == field


def test_an_event_without_headers_says_so_with_an_empty_mapping() -> None:
    with pytest.raises(InvalidEvent, match="headers: None is no mapping"):
        stage(Event("order.placed", {}, headers=None))  # type: ignore[arg-type]


def test_of_several_events_the_bad_one_is_named() -> None:
    with pytest.raises(InvalidEvent) as rejected:
        stage(Event("a", {}), Event("b", {"price": [NAN]}))
    assert rejected.value.path == "events[1].payload.price[0]"


def test_something_that_is_no_event_is_rejected() -> None:
    with pytest.raises(InvalidEvent, match="a dict is not an Event") as rejected:
        stage(Event("a", {}), {"event_type": "b"})  # type: ignore[arg-type]
    assert rejected.value.path == "events[1]"


def test_good_fields_pass_unchanged() -> None:
    local = AWARE.astimezone(timezone(timedelta(hours=2)))
    retry = RetryPolicy(max_attempts=3)
    [draft] = stage(
        Event(
            "order.placed",
            {},
            aggregate_type="order",
            aggregate_id="A-1",
            headers={"tenant": "blå", "x.y_z-1": ""},
            topic="orders.v1_eu-west",
            key="k" * 500,
            routing_key="order.#",
            priority=Priority.HIGH,
            schema_version=2,
            saga_id="s",
            sequence=0,
            max_attempts=32_767,
            retry=retry,
            created_at=local,
            available_at=AWARE,
        )
    )
    assert (draft.topic, draft.key, draft.routing_key, draft.priority) == ("orders.v1_eu-west", "k" * 500, "order.#", 8)
    assert (draft.sequence, draft.max_attempts, draft.created_at) == (0, 32_767, local)
    assert json.loads(draft.headers) == {"tenant": "blå", "x.y_z-1": ""}
    assert RetryPolicy.from_json(json.loads(draft.retry or "")) == retry


def test_the_first_of_two_events_with_the_same_id_wins() -> None:
    one, other = UUID(int=1), UUID(int=2)
    staged = validate_events(
        [Event("first", {}, event_id=one), Event("b", {}, event_id=other), Event("second", {}, event_id=one)],
        StagingRules(),
    )
    assert [draft.event_type for draft in staged.plain] == ["first", "b"]
    assert staged.ids == (one, other, one)
    assert staged.supplied


def test_events_without_an_id_get_one_that_sorts_by_time() -> None:
    staged = validate_events([Event("a", {}), Event("b", {})], StagingRules())
    assert len(set(staged.ids)) == 2
    assert {event_id.version for event_id in staged.ids} == {7}
    assert not staged.supplied


def test_only_events_with_a_key_are_counted() -> None:
    staged = validate_events(
        [
            Event("keyed", {}, key="A", sequence="auto"),
            Event("aggregate", {}, aggregate_id="B", sequence="auto"),
            Event("keyless", {}, sequence="auto"),
            Event("plain", {}, key="C"),
        ],
        StagingRules(),
    )
    assert [draft.event_type for draft in staged.numbered] == ["keyed", "aggregate"]
    assert [draft.event_type for draft in staged.plain] == ["keyless", "plain"]


def test_a_stream_is_numbered_for_all_its_events_or_for_none() -> None:
    with pytest.raises(InvalidEvent, match="numbered for some events only") as rejected:
        stage(Event("a", {}, key="A", topic="t", sequence="auto"), Event("b", {}, key="A", topic="t"))
    assert rejected.value.path == "sequence"


def test_the_same_key_may_be_numbered_in_one_stream_and_not_in_another() -> None:
    stage(
        Event("a", {}, key="A", topic="t", sequence="auto"),
        Event("b", {}, key="A", topic="u"),
        Event("c", {}, key="A", topic="t", priority=Priority.HIGH),
    )


def test_the_rule_decides_where_events_without_a_topic_go() -> None:
    events = [Event("a", {}), Event("b", {}, routing_key="to.me"), Event("c", {}, topic="own")]
    assert [draft.topic for draft in stage(*events)] == ["events.a", "to.me", "own"]
    assert stage(Event("a", {}), topic_rule=lambda event_type, *_: f"mine-{event_type}")[0].topic == "mine-a"
