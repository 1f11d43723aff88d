"""`outrider audit` on a SQLite store, the name of the operator, and the commands of the page about the audit log."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.saga.model import AuditEntry, SagaChange, Status
from outrider.stores.sqlite import SqliteSagas
from outrider.testing.saga_harness import claim_of, new_saga
from tests.support.doc_snippets import ROOT

KEY = "correct-horse-battery"
NOTE = AuditEntry(Status.STARTED, Status.RUNNING, None, "became running", "ann", "first attempt")


async def _fill(path: Path) -> None:
    """Leave a saga that runs, and a removed saga whose lines are still there."""
    sagas = SqliteSagas(path)
    for correlation_id in ("gone", "runs"):
        async with sagas.transaction() as tx:
            await sagas.start(tx, new_saga(correlation_id))
        [record] = await sagas.claim("w", [("order", 1)], limit=1, lease_seconds=60)
        status = Status.COMPLETED if correlation_id == "gone" else Status.RUNNING
        change = SagaChange(replace(record.instance, status=status), notes=[NOTE, NOTE], at=record.now)
        async with sagas.transaction() as tx:
            await sagas.save(tx, claim_of(record), replace(change, release=status is Status.COMPLETED), 60)
        await sagas.prune(saga_days=0, audit_days=10, participant_memory_days=1)
    await sagas.close()


@pytest.fixture
def store(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    asyncio.run(_fill(sqlite_path))
    monkeypatch.setenv("OUTRIDER_STORE", f"sqlite:///{sqlite_path}")
    return sqlite_path


def _run(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_lines_are_listed_latest_first_and_chosen_by_saga_person_and_time(store: Path) -> None:
    saga_id = str(new_saga("runs").saga_id)
    assert [line["line"] for line in _run("audit", "list", "--saga", saga_id)] == [3, 2, 1]
    assert {line["what"] for line in _run("audit", "ls", "--actor", "application")} == {"started"}
    assert _run("audit", "list", "--since", "2100-01-01") == []
    assert "first attempt" in CliRunner().invoke(app, ["audit", "list", "--limit", "1"]).stdout
    assert CliRunner().invoke(app, ["audit", "list", "--since", "soon"]).exit_code == 2


def test_a_verification_counts_names_the_line_and_exits_with_1(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _run("audit", "verify")
    counts = {name: report[name] for name in ("lines", "chains", "anchors", "findings")}
    assert counts == {"lines": 6, "chains": 2, "anchors": 1, "findings": []}
    anchor = report["last_anchor"]
    assert _run("audit", "verify", "--expect", anchor)["findings"] == []
    assert "keep it elsewhere" in CliRunner().invoke(app, ["audit", "verify"]).stdout
    [lost] = _run("audit", "verify", "--expect", "2" + anchor[1:], code=1)["findings"]
    assert lost["anchor"] == 2
    monkeypatch.setenv("OUTRIDER_AUDIT_KEY", KEY)
    assert len(_run("audit", "verify", code=1)["findings"]) == 5
    assert _run("audit", "verify", "--keyed-since", "2100-01-01")["findings"] == []
    monkeypatch.delenv("OUTRIDER_AUDIT_KEY")
    with closing(sqlite3.connect(store)) as conn, conn:
        conn.execute("DROP TRIGGER saga_audit_unchanged")
        conn.execute("UPDATE saga_audit_log SET actor = 'eve' WHERE id = 6")
    [finding] = _run("audit", "verify", code=1)["findings"]
    assert (finding["saga_id"], finding["line"]) == (str(new_saga("runs").saga_id), 3)
    shown = CliRunner().invoke(app, ["audit", "verify"])
    assert (shown.exit_code, "changed or forged" in shown.stdout, "1 findings" in shown.stderr) == (1, True, True)


def test_old_lines_are_removed_and_the_rest_verifies(store: Path) -> None:
    assert _run("audit", "prune", "--days", "0", "--yes") == {"removed": 3}
    report = _run("audit", "verify")
    assert (report["findings"], report["lines"], report["anchors"]) == ([], 3, 2)
    assert CliRunner().invoke(app, ["audit", "prune", "--json"]).exit_code == 2


def test_the_operator_is_the_one_who_is_named_and_never_unknown(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["saga", "compensate", str(new_saga("runs").saga_id)]

    def sent(*more: str) -> tuple[str, str]:
        result = CliRunner().invoke(app, [*command, *more])
        assert result.exit_code == 0, result.output
        with closing(sqlite3.connect(store)) as conn:
            [body] = conn.execute("SELECT body FROM saga_mailbox ORDER BY message_id DESC LIMIT 1").fetchone()
        return json.loads(body)["actor"], result.stderr

    monkeypatch.delenv("OUTRIDER_ACTOR", raising=False)
    assert sent("--as", "ann") == ("ann", "")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    name, warning = sent()
    assert (name, "recorded as cli:root" in warning) == ("cli:root", True)
    monkeypatch.setenv("OUTRIDER_ACTOR", "bob")
    assert sent() == ("bob", "")
    assert sent("--as", "ann") == ("ann", "")
    monkeypatch.setenv("OUTRIDER_ACTOR", " ")

    def no_name() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", no_name)
    refused = CliRunner().invoke(app, command)
    assert (refused.exit_code, "say who you are" in refused.stderr) == (2, True)


def test_the_commands_of_the_page_run(store: Path) -> None:
    page = (ROOT / "docs/how-to/audit.md").read_text()
    commands = [line[len("$ outrider ") :].split() for line in page.splitlines() if line.startswith("$ outrider ")]
    assert len(commands) == 7
    for command in commands:
        assert CliRunner().invoke(app, command).exit_code == 0, command


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_operator_commands_are_listed_verified_and_removed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", TRACE)
    schema = ["schema", "register", "order.placed", "1", "-", "--as", "ann"]
    assert CliRunner().invoke(app, schema, input='{"type": "object"}').exit_code == 0
    [line] = _run("audit", "list", "--operations", "--actor", "ann")
    assert (line["line"], line["verb"], line["traceparent"]) == (1, "schema_register", TRACE)
    assert (line["detail"]["event_type"], line["detail"]["version"]) == ("order.placed", "1")
    assert _run("audit", "list", "--operations", "--event", str(new_saga("runs").saga_id)) == []
    assert "schema_register" in CliRunner().invoke(app, ["audit", "list", "--operations"]).stdout
    for wrong in (["--operations", "--saga", "x"], ["--event", "x"]):
        assert CliRunner().invoke(app, ["audit", "list", *wrong]).exit_code == 2
    assert _run("audit", "prune", "--days", "1", "--yes", "--as", "bob") == {"removed": 0}
    [pruned, _] = _run("audit", "list", "--operations")
    assert (pruned["verb"], pruned["actor"], pruned["detail"]) == ("audit_prune", "bob", {"days": 1})
    report = _run("audit", "verify")
    assert report["operations"] == {"lines": 2, "unchained": 0, "without_details": 0}
    assert "2 lines of the operation log" in CliRunner().invoke(app, ["audit", "verify"]).stdout
    with closing(sqlite3.connect(store)) as conn, conn:
        conn.execute("DROP TRIGGER outbox_operation_unchanged")
        conn.execute("UPDATE outbox_operation SET actor = 'eve' WHERE line = 2")
    [finding] = _run("audit", "verify", code=1)["findings"]
    assert (finding["log"], finding["line"], finding["saga_id"]) == ("operations", 2, None)
