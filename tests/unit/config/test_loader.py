"""Settings: options over variables over defaults; misspelt ones are rejected; secrets are hidden."""

from __future__ import annotations

import pytest

from outrider import RelaySettings, config
from outrider.errors import InvalidSetting


def test_an_option_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    env = {"OUTRIDER_STORE": "sqlite:///env.db", "OUTRIDER_LEASE_SECONDS": "20", "OUTRIDER_BATCH_MAX": "7"}
    loaded = config.load({"store": "sqlite:///given.db", "lease_seconds": 30.0, "batch_max": None}, env)
    assert loaded.store_url() == "sqlite:///given.db"
    assert (loaded.relay.lease_seconds, loaded.relay.batch_max) == (30.0, 7)
    assert loaded.relay.workers == RelaySettings().workers


def test_a_misspelt_variable_is_rejected_with_the_nearest_valid_name() -> None:
    with pytest.raises(
        InvalidSetting, match=r"OUTRIDER_LEASE_SECOND is not a setting.*did you mean OUTRIDER_LEASE_SECONDS"
    ):
        config.load({}, {"OUTRIDER_LEASE_SECOND": "4"})


def test_a_variable_like_no_other_is_rejected_with_the_whole_list() -> None:
    with pytest.raises(InvalidSetting, match=r"OUTRIDER_XYZ is not a setting.*OUTRIDER_STORE, OUTRIDER_BROKER"):
        config.load({}, {"OUTRIDER_XYZ": "4"})


def test_variables_of_the_test_suite_and_of_other_programs_are_left_alone() -> None:
    config.load({}, {"OUTRIDER_TEST_POSTGRES": "x", "OUTRIDER_REQUIRE_POSTGRES": "1", "HOME": "/", "OUTRIDERS": "y"})


def test_a_misspelt_option_is_rejected_with_the_nearest_valid_name() -> None:
    with pytest.raises(InvalidSetting, match=r"did you mean batch_max"):
        config.load({"batch_maximum": 4}, {})


@pytest.mark.parametrize("text", ["many", "", "1.5"])
def test_a_count_that_is_not_a_whole_number_is_rejected(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"OUTRIDER_BATCH_MAX.*is not a whole number"):
        config.load({}, {"OUTRIDER_BATCH_MAX": text})


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1"])
def test_a_time_that_cannot_pass_is_rejected(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"OUTRIDER_PUBLISH_TIMEOUT_SECONDS.*above 0"):
        config.load({}, {"OUTRIDER_PUBLISH_TIMEOUT_SECONDS": text})


def test_settings_that_contradict_each_other_are_rejected() -> None:
    with pytest.raises(InvalidSetting, match=r"less than half of lease_seconds"):
        config.load({"lease_seconds": 2.0}, {})


def test_a_missing_store_is_an_error_that_names_the_fix() -> None:
    with pytest.raises(InvalidSetting, match=r"pass --store URL or set OUTRIDER_STORE"):
        config.load({}, {"OUTRIDER_STORE": ""}).store_url()


def test_settings_survive_the_way_through_the_environment_of_a_child() -> None:
    loaded = config.load(
        {
            "store": "sqlite:///a.db",
            "broker": "null://",
            "schema": "shop",
            "lease_seconds": 2.5,
            "publish_timeout_seconds": 0.75,
            "workers": 3,
        },
        {},
    )
    assert config.load({}, config.variables(loaded)) == loaded


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:secret@db:5432/x", "postgresql://u:***@db:5432/x"),
        ("postgresql://u:s/e@c:r#t@db/x", "postgresql://u:***@db/x"),
        (
            "postgresql://db/x?user=u&password=secret&sslmode=require",
            "postgresql://db/x?user=u&password=***",
        ),
        ("amqp://:secret@mq//", "amqp://:***@mq//"),
        ("postgresql://db:5432/x", "postgresql://db:5432/x"),
        ("sqlite:///a.db", "sqlite:///a.db"),
    ],
)
def test_passwords_are_hidden_wherever_a_url_carries_them(url: str, shown: str) -> None:
    assert config.redacted(url) == shown
    assert config.redacted(f"cannot reach {url} now") == f"cannot reach {shown} now"
