"""The delay before the next attempt."""

from __future__ import annotations

import json
import random

import pytest

from outrider import RetryPolicy
from outrider.errors import InvalidSetting


def test_without_jitter_the_wait_doubles_until_the_cap() -> None:
    policy = RetryPolicy(base_seconds=1, factor=2, cap_seconds=10, jitter=0)
    assert [policy.delay_seconds(attempt, random.Random(0)) for attempt in range(1, 7)] == [1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize("attempt", [1, 3, 50])
def test_jitter_keeps_the_wait_within_its_share(attempt: int) -> None:
    policy, rng = RetryPolicy(jitter=0.25), random.Random(7)
    plain = RetryPolicy(jitter=0).delay_seconds(attempt, rng)
    waits = [policy.delay_seconds(attempt, rng) for _ in range(500)]
    assert plain * 0.75 <= min(waits) < plain < max(waits) <= plain * 1.25


def test_no_number_of_attempts_overflows() -> None:
    assert RetryPolicy(factor=10, cap_seconds=60, jitter=0).delay_seconds(100_000, random.Random(0)) == 60


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base_seconds", 0),
        ("base_seconds", -1),
        ("factor", 0.5),
        ("cap_seconds", 0.5),
        ("jitter", -0.1),
        ("jitter", 1),
        ("max_attempts", 0),
        ("max_attempts", 2.5),
        ("max_attempts", True),
        ("base_seconds", float("nan")),
        ("cap_seconds", float("inf")),
        ("factor", float("nan")),
    ],
)
def test_a_policy_that_cannot_work_is_rejected_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=rf"retry\.{name} = {value}"):
        RetryPolicy(**{name: value})  # type: ignore[arg-type]


def test_a_policy_survives_being_stored() -> None:
    policy = RetryPolicy(base_seconds=3, factor=1.5, cap_seconds=90, jitter=0.1, max_attempts=4)
    assert RetryPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


def test_a_foreign_policy_may_say_only_what_differs() -> None:
    assert RetryPolicy.from_json({"max_attempts": 3}) == RetryPolicy(max_attempts=3)


def test_a_text_is_no_number_of_seconds() -> None:
    with pytest.raises(InvalidSetting, match=r"retry\.base_seconds = '1' cannot work; use a number"):
        RetryPolicy(base_seconds="1")  # type: ignore[arg-type]
