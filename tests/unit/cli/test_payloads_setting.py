"""The setting `payloads`, through the command line and on a SQLite file."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.cli.test_commands import Shell, bare, shell

__all__ = ["bare", "shell"]

MODULE = """
from outrider import Inbox
from outrider.payload import Payloads, required_fields

payloads = Payloads(
    {"order.placed": {1: {"properties": {"total": {"type": "integer"}}}}},
    upcasters={"order.placed": {1: lambda payload: {**payload, "currency": "EUR"}}},
)
inbox = Inbox()

@inbox.handler("order.placed", consumer="billing", topic="orders")
async def bill(event, tx):
    assert event.payload["currency"] == "EUR"
"""
NAME = "shop_payloads:payloads"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_payloads.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Child processes find it as well.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_payloads", raising=False)


def insert(shell: Shell, *totals: str) -> list[str]:
    """Insert rows as another program would."""
    sql = "INSERT INTO outbox (event_type, topic, key, payload) VALUES ('order.placed', 'orders', 'A', ?)"
    with closing(sqlite3.connect(shell.path, isolation_level=None)) as conn:
        rows = [conn.execute(f"{sql} RETURNING event_id", (f'{{"total": {total}}}',)) for total in totals]
        return [str(row.fetchone()[0]) for row in rows]


def published(shell: Shell) -> list[str]:
    with closing(sqlite3.connect(shell.path.parent / "log.db")) as conn:
        return [bytes(body).decode() for (body,) in conn.execute("SELECT body FROM log ORDER BY rowid")]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_bad_plain_insert_is_dead_lettered_corrected_and_replayed_in_order(
    shell: Shell, tmp_path: Path, processes: str
) -> None:
    filed, good, bad = tmp_path / "outrider.yaml", tmp_path / "good.json", tmp_path / "bad.json"
    filed.write_text(f"payloads: {NAME}\n")
    good.write_text('{"total": 2}')
    bad.write_text('{"total": "two"}')
    settings = ("--config", str(filed))
    _, event_id, _ = insert(shell, "1", '"two"', "3")
    shell("relay", "--until-empty", "--processes", processes, *settings, code=1)
    [letter] = shell.json("dead-letters", "list")
    assert (letter["event_id"], letter["reason"]) == (event_id, "schema_validation_failed")
    assert published(shell) == ['{"total": 1}']
    said = shell("dead-letters", "edit", event_id, "--payload-file", str(bad), *settings, code=2).stderr
    assert "payload.total" in said
    shell("dead-letters", "edit", event_id, "--payload-file", str(good), *settings)
    shell("dead-letters", "replay", event_id)
    shell("relay", "--until-empty", *settings)
    assert published(shell) == ['{"total": 1}', '{"total":2}', '{"total": 3}']


def test_consumers_open_events_by_the_setting(shell: Shell) -> None:
    insert(shell, "1")
    shell("relay", "--until-empty")
    done = shell("consume", "shop_payloads:inbox", "--until-idle", "0.5", "--json", OUTRIDER_PAYLOADS=NAME)
    assert '"applied": 1' in done.stdout


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("shop_payloads", "names no payloads"),
        ("shop_missing:payloads", "there is no module shop_missing here"),
        ("shop_payloads:inbox", "shop_payloads:inbox is no Payloads; did you mean shop_payloads:payloads?"),
    ],
)
def test_payloads_that_cannot_be_used_are_refused_before_the_relay_starts(shell: Shell, target: str, said: str) -> None:
    [event_id] = insert(shell, "1")
    assert said in shell("relay", "--until-empty", code=2, OUTRIDER_PAYLOADS=target).stderr
    assert shell.json("events", "show", event_id)["state"] == "pending"
