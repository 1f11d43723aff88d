"""`outrider erase` on a SQLite file and an embedded log."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest

import outrider
from outrider import Event
from outrider.brokers.embedded import EmbeddedBroker
from outrider.event import SKIPPED_TYPE
from tests.unit.cli.test_commands import Shell, bare, shell

__all__ = ["bare", "shell"]

ANN = "customer:42"

CANARY = "ann@example.com"

YES = ("--yes", "--as", "operator")


def _stage(shell: Shell, *subjects: str | None, **fields: Any) -> None:
    events = [
        Event(
            "order.placed",
            {"email": CANARY if each == ANN else "bob@example.com"},
            topic="orders",
            subject=each,
            **fields,
        )
        for each in subjects
    ]
    with closing(sqlite3.connect(shell.path, isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        outrider.stage_sync(conn, *events)
        conn.execute("COMMIT")


def _relay(shell: Shell) -> None:
    shell("relay", "--until-empty")


def _log(shell: Shell) -> list[Any]:
    path = shell.environment["OUTRIDER_BROKER"].removeprefix("embedded:///")

    async def read() -> list[Any]:
        broker = EmbeddedBroker(path)
        try:
            return [entry.message for entry in await broker.read("test", None, 100)]
        finally:
            await broker.close()

    return asyncio.run(read())


def test_a_subject_is_counted_erased_and_searched_again(shell: Shell) -> None:
    _stage(shell, ANN, "customer:7", ANN, headers={"note": CANARY})
    _relay(shell)
    planned = shell.json("erase", "--subject", ANN, "--dry-run")
    counts = {row["place"]: row["rows"] for row in planned["would_erase"]}
    assert counts == {"archived event": 2, "message in the embedded log": 2}
    assert "archived event" in shell("erase", "--subject", ANN, "--verify", code=1).stdout
    shown = shell("erase", "--subject", ANN, *YES).stdout
    assert "erased by operator" in shown
    assert "2 of archived event" in shown
    assert 'readable in brokers: {"order.placed": 2}' in shown
    assert "not reached: backups" in shown
    assert "nothing is stored" in shell("erase", "--subject", ANN, "--verify").stdout
    assert "nothing is left; erased by operator" in shell("erase", "--subject", ANN, *YES).stdout


def test_bodies_in_the_embedded_log_are_erased_and_those_of_others_stay(shell: Shell) -> None:
    _stage(shell, ANN, "customer:7")
    _relay(shell)
    [erased] = shell.json("erase", "--subject", ANN, *YES)
    assert erased["erased"] == {"archived event": 1, "message in the embedded log": 1}
    ours, theirs = sorted(_log(shell), key=lambda message: "subject" in message.headers)
    assert json.loads(ours.body) == {"$erased": True}
    assert "subject" not in ours.headers
    assert ours.headers["event_type"] == "order.placed"
    assert theirs.headers["subject"] == "customer:7"
    assert b"bob@example.com" in theirs.body


def test_an_undelivered_event_stops_the_run_and_the_commands_that_help_are_named(shell: Shell) -> None:
    _stage(shell, ANN)
    shown = shell("erase", "--subject", ANN, *YES, code=1).stdout
    assert "nothing was erased" in shown
    assert "outrider relay" in shown
    assert "--discard-undelivered" in shown
    [refused] = shell.json("erase", "--subject", ANN, *YES, code=1)
    assert [row["kind"] for row in refused["in_the_way"]] == ["undelivered event"]
    assert len(shell.json("events", "list")) == 1
    _relay(shell)
    assert shell.json("erase", "--subject", ANN, *YES)[0]["complete"]


def test_undelivered_events_are_discarded_on_demand_and_recorded(shell: Shell) -> None:
    _stage(shell, "customer:7", ANN, "customer:7", key="A", sequence="auto")
    [erased] = shell.json("erase", "--subject", ANN, "--discard-undelivered", *YES)
    assert erased["erased"] == {"discarded event": 1}
    _relay(shell)
    assert [message.headers["event_type"] for message in _log(shell)] == ["order.placed", SKIPPED_TYPE, "order.placed"]
    with closing(sqlite3.connect(shell.path)) as conn:
        rows = conn.execute("SELECT verb, actor FROM outbox_operation ORDER BY id").fetchall()
    assert rows == [("dead_letter", "operator"), ("discard", "operator")]


def test_an_erased_dead_letter_cannot_be_sent_again(shell: Shell) -> None:
    _stage(shell, ANN)
    [event] = shell.json("events", "list")
    shell("dead-letters", "add", event["event_id"], "--policy", "skip", "--as", "operator")
    shell("erase", "--subject", ANN, *YES)
    refused = shell("dead-letters", "replay", event["event_id"], *YES, code=1).stderr
    assert "was erased" in refused
    assert "discarded" in shell("dead-letters", "discard", event["event_id"], *YES).stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "say whose data to erase"),
        (["--subject", ANN, "--dry-run", "--verify"], "use one of them"),
        (["--subject", "", "--yes"], "is no subject"),
        (["--subject", ANN], "add --yes"),
    ],
)
def test_a_misuse_is_explained(shell: Shell, arguments: list[str], problem: str) -> None:
    assert problem in shell("erase", *arguments, code=2).stderr
