"""Settings, and the relations between them."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import RelaySettings
from outrider.errors import InvalidSetting
from outrider.event import OnDeadLetter
from outrider.outbox.settings import LEASE_MARGIN


def test_the_defaults_fit_together() -> None:
    settings = RelaySettings()
    assert settings.lease_seconds == 15
    assert settings.publish_timeout_seconds < settings.lease_seconds / 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lease_seconds": 10, "publish_timeout_seconds": 5}, "publish_timeout_seconds"),
        ({"lease_seconds": 2}, "publish_timeout_seconds"),
        ({"poll_seconds_min": 0}, "poll_seconds_min"),
        ({"poll_seconds_min": 2, "poll_seconds_max": 1}, "poll_seconds_min"),
        ({"batch_max": 0}, "batch_max"),
        ({"in_flight_max": 0}, "in_flight_max"),
        ({"workers": 0}, "workers"),
        ({"maintenance_interval_seconds": 0}, "maintenance_interval_seconds"),
        ({"breaker_seconds_base": 0}, "breaker_seconds_base"),
    ],
)
def test_settings_that_cannot_work_are_rejected_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        RelaySettings(**settings)


@pytest.mark.parametrize("lease_seconds", [1, 6, 15, 60])
def test_two_renewals_may_fail_before_a_relay_stops_trusting_its_lease(lease_seconds: float) -> None:
    settings = RelaySettings(lease_seconds=lease_seconds, publish_timeout_seconds=lease_seconds / 3)
    assert settings.heartbeat_seconds * 2 < lease_seconds * LEASE_MARGIN < lease_seconds


def test_a_relay_can_publish_right_up_to_its_next_renewal() -> None:
    settings = RelaySettings()
    assert settings.heartbeat_seconds + settings.publish_timeout_seconds < settings.lease_seconds * LEASE_MARGIN


def test_the_first_pattern_that_matches_decides_the_policy() -> None:
    settings = RelaySettings(
        dead_letter_policies={"mail.urgent": OnDeadLetter.BLOCK, "mail.*": OnDeadLetter.SKIP, "*": OnDeadLetter.BLOCK},
    )
    assert settings.policy_of("mail.urgent") is OnDeadLetter.BLOCK
    assert settings.policy_of("mail.news") is OnDeadLetter.SKIP
    assert settings.policy_of("orders") is OnDeadLetter.BLOCK


def test_without_a_pattern_the_default_policy_applies() -> None:
    assert RelaySettings(on_dead_letter=OnDeadLetter.SKIP).policy_of("orders") is OnDeadLetter.SKIP


def test_patterns_tell_capitals_apart() -> None:
    settings = RelaySettings(dead_letter_policies={"Mail": OnDeadLetter.SKIP})
    assert settings.policy_of("mail") is OnDeadLetter.BLOCK
