"""Settings of a saga worker, and the merge of states of parallel steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.errors import InvalidSetting
from outrider.saga import SagaSettings
from outrider.saga.state.merge import merged


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"concurrency": 0}, "concurrency = 0"),
        ({"lease_seconds": -1}, "lease_seconds = -1"),
        ({"poll_seconds_min": 2, "poll_seconds_max": 1}, "poll_seconds_min"),
        ({"lease_seconds": 2, "poll_seconds_max": 1}, "a third of lease_seconds"),
        ({"saga_days": 400}, "audit_days"),
        ({"saga_days": 30}, r"saga_days \(30\) is less than participant_memory_days .* raise saga_days"),
        ({"lease_seconds": float("nan")}, "lease_seconds = nan"),
        ({"lease_seconds": float("inf")}, "lease_seconds = inf"),
        ({"lease_seconds": "15"}, "lease_seconds = '15' cannot work; use a number"),
        ({"lease_seconds": 1e13}, "to 1,000,000"),
        ({"saga_days": float("nan")}, "saga_days = nan"),
        ({"saga_days": 1e9}, "to 36,500"),
        ({"concurrency": 0.5}, "concurrency = 0.5 cannot work; use a whole number"),
        ({"concurrency": True}, "concurrency = True"),
    ],
)
def test_settings_that_cannot_work_are_rejected_with_their_names(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidSetting, match=error):
        SagaSettings(**settings)


@pytest.mark.parametrize(
    ("current", "before", "after", "expected"),
    [
        ({"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": 1}, {"a": 1}, {"a": 2}),
        ({"a": 2, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}),
        ({"a": 2}, {"a": 1}, {"a": 3}, {"a": 3}),
        ({"a": {"x": 2, "y": 1}}, {"a": {"x": 1, "y": 1}}, {"a": {"x": 1, "y": 2}}, {"a": {"x": 2, "y": 2}}),
        ({"a": {"x": 1, "z": 1}}, {"a": {"x": 1}}, {"a": {}}, {"a": {"z": 1}}),
        ({"a": [1, 2], "b": 1}, {"a": [1], "b": 0}, {"a": [1, 3], "b": 0}, {"a": [1, 3], "b": 1}),
        ({"a": 1, "b": 1}, {"a": 1, "b": 0}, {"a": True, "b": 0}, {"a": True, "b": 1}),
        ({"b": 1}, {"a": None, "b": 0}, {"a": "é", "b": 0}, {"b": 1, "a": "é"}),
    ],
)
def test_what_one_step_changed_is_kept_when_another_is_saved(
    current: Any, before: Any, after: Any, expected: Any
) -> None:
    states = [json.dumps(state).encode() for state in (current, before, after)]
    assert json.dumps(json.loads(merged(*states))) == json.dumps(expected)
