"""Upcasters: every old version opens as the current one, or the program does not start."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import Event, UsageError
from outrider.errors import InvalidPayload
from outrider.payload import Payloads, Upcaster


def step(number: int) -> Any:
    return lambda payload: {**payload, "seen": [*payload["seen"], number]}


def chain(count: int) -> dict[int, Any]:
    return {number: step(number) for number in range(1, count)}


@given(st.integers(2, 30).flatmap(lambda current: st.tuples(st.just(current), st.integers(1, current))))
def test_every_old_version_opens_as_the_current_one(pair: tuple[int, int]) -> None:
    current, version = pair
    payloads = Payloads(upcasters={"order.placed": chain(current)})
    opened = payloads.open(Event("order.placed", {"seen": []}, schema_version=version))
    assert opened.schema_version == current
    assert opened.payload["seen"] == list(range(version, current))


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=8))
def test_every_old_semantic_version_opens_as_the_current_one(parts: set[tuple[int, int, int]]) -> None:
    versions = [".".join(map(str, each)) for each in sorted(parts)]
    steps = [Upcaster("paid", old, new, lambda payload: payload + 1) for old, new in itertools.pairwise(versions)]
    payloads = Payloads(upcasters=steps)
    for index, version in enumerate(versions):
        opened = payloads.open(Event("paid", 0, schema_version=version))
        assert (opened.schema_version, opened.payload) == (versions[-1], len(versions) - 1 - index)


def test_a_step_may_leave_versions_out() -> None:
    steps = [Upcaster("paid", 1, 3, lambda _: "from 1"), Upcaster("paid", 2, 3, lambda _: "from 2")]
    payloads = Payloads(upcasters=steps)
    assert payloads.open(Event("paid", "", schema_version=1)).payload == "from 1"
    assert payloads.open(Event("paid", "", schema_version=2)).payload == "from 2"


def test_other_types_and_current_events_are_the_same_object() -> None:
    payloads = Payloads(upcasters={"paid": chain(2)})
    for event in (Event("sent", {}), Event("paid", {}, schema_version=2)):
        assert payloads.open(event) is event


def test_an_upcaster_that_changes_its_argument_leaves_the_event_as_it_was() -> None:
    def careless(payload: Any) -> Any:
        payload["lines"].clear()
        return payload

    event = Event("paid", {"lines": [1, 2]})
    before = copy.deepcopy(event.payload)
    assert Payloads(upcasters={"paid": {1: careless}}).open(event).payload == {"lines": []}
    assert event.payload == before


@pytest.mark.parametrize(
    ("schemas", "upcasters", "missing"),
    [
        (None, {"paid": {1: dict, 3: dict}}, "no upcaster from version 2"),
        (None, {"paid": {2: dict}}, "no upcaster from version 1"),
        ({"paid": {"1.0.0": {}, "1.5.0": {}}}, [Upcaster("paid", "1.0.0", "2.0.0", dict)], "from version '1.5.0'"),
        (None, [Upcaster("paid", 1, 2, dict), Upcaster("paid", 3, 4, dict)], "from version 2"),
    ],
)
def test_a_chain_with_a_gap_is_refused_at_the_start(schemas: Any, upcasters: Any, missing: str) -> None:
    with pytest.raises(UsageError, match="does not open as the current version") as raised:
        Payloads(schemas, upcasters=upcasters)
    assert missing.replace("'", "") in str(raised.value).replace("'", "")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Upcaster("paid", 2, 2, dict), "to a later version"),
        (lambda: Upcaster("paid", "2.0.0", "1.9.9", dict), "to a later version"),
        (lambda: Upcaster("paid", "two", 3, dict), "is no version"),
        (lambda: Payloads(upcasters=[Upcaster("paid", 1, 2, dict), Upcaster("paid", 1, 3, dict)]), "two upcasters"),
        (lambda: Payloads(upcasters=[dict]), "is no upcaster"),  # type: ignore[list-item]
        (lambda: Payloads(upcasters={"paid": {"1.0.0": dict}}), "the version after '1.0.0' is not known"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_step_is_refused_with_the_remedy(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_a_newer_version_does_not_open() -> None:
    with pytest.raises(InvalidPayload, match="version 3 does not open as the current version 2") as raised:
        Payloads(upcasters={"paid": chain(2)}).open(Event("paid", {}, schema_version=3))
    assert raised.value.reason == "schema_validation_failed"


def test_an_upcaster_that_raises_is_named_without_the_text_of_its_error() -> None:
    def broken(payload: Any) -> Any:
        raise ValueError(f"cannot read {payload}")

    with pytest.raises(InvalidPayload, match="from version 1 to 2 raised ValueError") as raised:
        Payloads(upcasters={"paid": {1: broken}}).open(Event("paid", "canary"))
    assert "canary" not in str(raised.value)
