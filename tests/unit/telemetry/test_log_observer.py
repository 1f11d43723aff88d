"""Telemetry events as log records: constant messages, fields, levels; compact for people, JSON lines for programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

import pytest

from outrider import app
from outrider.telemetry.events import (
    EventDeadLettered,
    LanesClaimed,
    PassCompleted,
    RelayStarted,
    StoreUnavailable,
    TelemetryEvent,
)
from outrider.telemetry.log_observer import LogObserver, configure_logging, words

DEAD_LETTERED = EventDeadLettered(UUID(int=1), "orders", "order.placed", "poison_message", "block", "it broke\ntwice")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("outrider")
    handlers, level = list(root.handlers), ours.level
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)


@dataclass(frozen=True, slots=True)
class Awkward(TelemetryEvent):
    """Has fields whose names logging keeps for itself."""

    name: str
    message: str


def test_the_message_is_constant_and_the_details_are_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "outrider"):
        LogObserver().emit(RelayStarted("relay-1", 96))
    (record,) = caplog.records
    assert record.getMessage() == "relay started"
    assert (record.__dict__["relay"], record.__dict__["lanes"]) == ("relay-1", 96)


def test_every_telemetry_event_has_a_message_and_a_level_that_logging_knows(caplog: pytest.LogCaptureFixture) -> None:
    known = logging.getLevelNamesMapping()
    for kind in TelemetryEvent.__subclasses__():
        assert words(kind)
        assert kind.level.upper() in known


def test_a_telemetry_event_is_logged_at_its_own_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "outrider"):
        for fact in (DEAD_LETTERED, PassCompleted(1, 1, 1, 0.1, 0.1)):
            LogObserver().emit(fact)
    assert [record.levelname for record in caplog.records] == ["ERROR", "DEBUG"]


def test_field_names_that_logging_keeps_for_itself_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "outrider"):
        LogObserver().emit(Awkward("n", "m"))
    assert (caplog.records[0].__dict__["name_"], caplog.records[0].__dict__["message_"]) == ("n", "m")


def test_json_lines_are_one_object_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=True, level="info")
    LogObserver().emit(DEAD_LETTERED)
    LogObserver().emit(LanesClaimed("relay-1", (1, 2)))
    LogObserver().emit(PassCompleted(1, 1, 1, 0.1, 0.1))
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"], first["error"]) == ("error", "event dead lettered", "it broke\ntwice")
    assert first["event_id"] == str(UUID(int=1))
    assert first["timestamp"].endswith("+00:00")
    assert second["lanes"] == 2


def test_which_of_many_are_meant_is_logged_only_at_debug_level(capsys: pytest.CaptureFixture[str]) -> None:
    for level in ("info", "debug"):
        configure_logging(json=True, level=level)
        LogObserver().emit(LanesClaimed("relay-1", tuple(range(96))))
    usual, close = map(json.loads, capsys.readouterr().err.splitlines())
    assert usual["lanes"] == close["lanes"] == 96
    assert "lanes_list" not in usual
    assert close["lanes_list"] == list(range(96))


def test_compact_lines_show_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=False, level="info")
    LogObserver().emit(DEAD_LETTERED)
    line = capsys.readouterr().err
    assert "error   event dead lettered  " in line
    assert "topic=orders" in line
    assert line.count("\n") == 1


def test_configuring_twice_does_not_log_twice(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    configure_logging()
    LogObserver().emit(RelayStarted("relay-1", 96))
    assert capsys.readouterr().err.count("relay started") == 1


@pytest.mark.parametrize("as_json", [True, False])
def test_passwords_do_not_reach_the_log(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    app.configure_logging(json=as_json)
    app.log_observer().emit(StoreUnavailable("relay-1", "cannot reach postgresql://u:hunter2@db/x"))
    try:
        raise ValueError("postgresql://u:hunter2@db/x")
    except ValueError:
        logging.getLogger("outrider").exception("it broke")
    assert "hunter2" not in capsys.readouterr().err
