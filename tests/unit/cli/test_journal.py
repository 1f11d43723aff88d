"""`outrider db journal` and `outrider doctor --journal`, on a SQLite file."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from tests.unit.cli.test_commands import Shell, bare, shell

__all__ = ["bare", "shell"]


def delete(shell: Shell, event_id: str) -> None:
    """Delete an event by hand."""
    with closing(sqlite3.connect(shell.path)) as conn, conn:
        assert conn.execute("DELETE FROM outbox WHERE event_id = ?", (event_id,)).rowcount == 1


def test_the_switch_is_shown_and_turned(shell: Shell) -> None:
    assert shell.json("db", "journal") == {"journal": "off", "since": None, "changed": False}
    turned = shell.json("db", "journal", "on")
    assert (turned["journal"], turned["changed"]) == ("on", True)
    assert shell("db", "journal", "on").stdout.startswith("nothing to do: it is on since ")
    assert shell("db", "journal", "off").stdout.startswith("the journal is off since ")
    assert "Invalid value" in shell("db", "journal", "maybe", code=2).stderr


def test_a_journal_that_is_off_is_a_warning_with_the_command_that_helps(shell: Shell) -> None:
    assert "run: outrider db journal on" in shell("doctor", "--journal").stdout
    shell("doctor", "--journal", "--strict", code=1)
    assert shell.json("doctor", "--journal")["level"] == "warn"


def test_an_agreement_exits_with_0_and_needs_no_broker(shell: Shell) -> None:
    shell("db", "journal", "on")
    shell.stage("A", "B")
    shell("relay", "--until-empty")
    del shell.environment["OUTRIDER_BROKER"]
    report = shell.json("doctor", "--journal")
    assert (report["level"], report["findings"], report["counts"]) == ("ok", [], {})
    assert "2 events with entries" in shell("doctor", "--journal").stdout


def test_a_row_deleted_by_hand_is_named_with_its_entry_and_the_next_command(shell: Shell) -> None:
    shell("db", "journal", "on")
    lost, _ = shell.stage("A", "B")
    delete(shell, lost)
    report = shell.json("doctor", "--journal", code=1)
    [finding] = report["findings"]
    assert report["counts"] == {"lost": 1}
    assert (finding["event_id"], finding["problem"], finding["last_entry"]) == (lost, "lost", "staged")
    assert (finding["log_position"], finding["next"]) == ("1", f"outrider explain {lost}")
    output = shell("doctor", "--journal", code=1).stdout
    assert lost in output
    assert "something other than outrider deleted the event" in output


def test_the_journal_of_a_store_that_was_not_migrated_says_what_to_run(bare: Shell) -> None:
    bare("db", "migrate")
    with closing(sqlite3.connect(bare.path)) as conn, conn:
        conn.execute("DELETE FROM outbox_meta WHERE name = 'journal'")
    assert "the journal is not installed; run: outrider db migrate" in bare("db", "journal", "on", code=2).stderr


def test_an_unreachable_store_exits_with_3(shell: Shell) -> None:
    unreachable = "postgresql://localhost:1/shop"
    assert "does not answer" in shell("doctor", "--journal", "--store", unreachable, code=3).stderr
