"""The command line, on a SQLite store: what it prints, and its exit codes."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import typer
from typer.testing import CliRunner

import outrider
from outrider import Event, config
from outrider.cli import COMMANDS, app
from outrider.cli.options import number
from outrider.cli.output import Group

Call = Callable[..., Any]
NOBODY = str(UUID(int=7))


class Shell:
    """Runs commands against one store and one log."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.environment = {
            "OUTRIDER_STORE": f"sqlite:///{self.path}",
            "OUTRIDER_BROKER": f"embedded:///{directory / 'log.db'}",
        }

    def __call__(self, *args: str, code: int = 0, **variables: str) -> Any:
        result = CliRunner().invoke(app, list(args), env={**self.environment, **variables})
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    def json(self, *args: str, code: int = 0) -> Any:
        result = self(*args, "--json", code=code)
        return json.loads(result.stdout if code != 2 else result.stderr)

    def stage(self, *keys: str) -> list[str]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as conn:
            conn.execute("BEGIN IMMEDIATE")
            events = [Event("order.placed", {"secret": key}, topic="orders", key=key, sequence="auto") for key in keys]
            ids = outrider.stage_sync(conn, *events)
            conn.execute("COMMIT")
        return [str(event_id) for event_id in ids]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_") and name != "OUTRIDER_ACTOR"]:
        monkeypatch.delenv(name)
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def bare(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def shell(bare: Shell) -> Shell:
    bare("db", "migrate")
    return bare


def test_the_version_is_shown(bare: Shell) -> None:
    assert bare("--version").stdout.strip() == f"outrider {outrider.__version__}"


def test_status_is_a_finding_until_the_store_is_migrated(bare: Shell) -> None:
    assert bare.json("db", "status", code=1)["ready"] is False
    planned = bare.json("db", "plan")["steps"]
    assert "CREATE TABLE" in planned[0]["sql"]
    assert len(bare.json("db", "migrate")["applied"]) == len(planned)
    assert bare.json("db", "status")["ready"] is True
    assert "nothing to do" in bare("db", "migrate").stdout
    assert "nothing to do" in bare("db", "plan").stdout


def test_migrate_prints_every_step(bare: Shell) -> None:
    assert "] 0001_outbox: outbox_lane" in bare("db", "migrate", "--lanes", "4").stdout


def test_a_relay_publishes_what_is_staged_and_stops_when_nothing_is_due(shell: Shell) -> None:
    ids = shell.stage("a", "b", "a")
    assert [row["event_id"] for row in shell.json("events", "list")] == ids
    assert shell.json("relay", "--until-empty") == {"confirmed": 3, "dead_lettered": 0, "waiting": 0}
    assert shell.json("events", "list") == []
    assert {row["event_id"] for row in shell.json("events", "list", "--state", "sent")} == set(ids)
    assert shell.json("events", "show", ids[0])["state"] == "sent"


def test_several_processes_relay_under_one_parent_and_their_counts_are_one_result(shell: Shell) -> None:
    shell.stage("a", "b", "c", "d")
    output = shell.json("relay", "--until-empty", "--processes", "2", "--log-level", "error")
    assert output == {"confirmed": 4, "dead_lettered": 0, "waiting": 0}
    assert len(shell.json("events", "list", "--state", "sent")) == 4


@pytest.mark.parametrize("processes", ["1", "2"])
def test_dead_letters_and_blocked_events_are_counted_and_are_a_finding(shell: Shell, processes: str) -> None:
    shell.stage("a", "b")
    with closing(sqlite3.connect(shell.path)) as conn, conn:
        conn.execute("UPDATE outbox SET payload = json_quote(printf('%.*c', 1100000, 'x')) WHERE key = 'a'")
    shell.stage("a")
    relay = ("relay", "--until-empty", "--processes", processes)
    assert shell.json(*relay, code=1) == {"confirmed": 1, "dead_lettered": 1, "waiting": 1}
    assert shell(*relay, code=1).stdout == "0 events confirmed, 1 waiting; see: outrider events list\n"
    assert len(shell.json("dead-letters", "list")) == len(shell.json("events", "list")) == 1


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--store", "postgresql://u@127.0.0.1:1/x"), 3),
        (("--broker", "amqp://127.0.0.1:1"), 3),
        (("--broker", "kafka://127.0.0.1:1?acks=1"), 2),
    ],
)
def test_a_relay_that_cannot_start_prints_the_reason_and_exits_with_one_process_or_two(
    shell: Shell, capfd: pytest.CaptureFixture[str], options: tuple[str, str], code: int, processes: str
) -> None:
    output = shell("relay", "--until-empty", "--processes", processes, *options, code=code)
    said = output.stderr + capfd.readouterr().err
    assert "outrider: " in said
    assert "process crashed" not in said
    assert output.stdout == ""


def test_a_relay_without_an_archive_keeps_nothing(shell: Shell) -> None:
    shell.stage("a")
    shell("relay", "--until-empty", "--no-archive", "--broker", "null://")
    assert shell.json("events", "list", "--state", "sent") == []


def test_every_command_with_a_store_takes_a_file_of_settings(bare: Shell, tmp_path: Path) -> None:
    filed = tmp_path / "outrider.yaml"
    filed.write_text("store: sqlite:///${PLACE}\nbroker: {url: 'embedded:///${PLACE}.log'}\narchive: false\n")
    bare.environment = {"PLACE": str(bare.path), "OUTRIDER_STORE": "", "OUTRIDER_BROKER": ""}
    named = ("--config", str(filed))
    assert bare.json("db", "plan", *named)["steps"]
    bare("db", "migrate", *named)
    assert bare.json("db", "status", *named)["ready"]
    first, second = bare.stage("a", "b")
    assert bare.json("events", "show", first, *named)["state"] == "pending"
    bare("dead-letters", "add", first, *named)
    assert bare.json("dead-letters", "list", *named)[0]["event_id"] == first
    assert bare.json("dead-letters", "show", first, *named)["policy"] == "block"
    assert bare.json("dead-letters", "replay", first, *named) == {"replayed": 1}
    bare("dead-letters", "add", second, *named)
    assert bare.json("dead-letters", "discard", second, "--yes", *named) == {"discarded": 1}
    bare.environment["OUTRIDER_CONFIG"] = str(filed)
    assert bare.json("relay", "--until-empty")["confirmed"] == 2
    assert bare.json("events", "list", "--state", "sent", *named) == []


def test_a_setting_of_the_file_reaches_every_process(shell: Shell, tmp_path: Path) -> None:
    filed = tmp_path / "outrider.yaml"
    filed.write_text("processes: 2\nlog_level: error\ndead_letters: {topics: {orders: skip}}\n")
    (event_id,) = shell.stage("a")
    with closing(sqlite3.connect(shell.path)) as conn, conn:
        conn.execute("UPDATE outbox SET payload = json_quote(printf('%.*c', 1100000, 'x'))")
    shell("relay", "--until-empty", "--config", str(filed), code=1)
    [dead] = shell.json("dead-letters", "list")
    assert (dead["event_id"], dead["policy"]) == (event_id, "skip")


def test_the_settings_in_force_are_shown_with_their_origins(bare: Shell, tmp_path: Path) -> None:
    filed = tmp_path / "outrider.yaml"
    filed.write_text("broker: {url: 'kafka://b:9092', sasl.password: '${SECRET}'}\nrelay: {workers: 3}\n")
    bare.environment |= {"SECRET": "hunter2", "OUTRIDER_BROKER": ""}
    args = ("config", "show", "--config", str(filed), "--schema", "shop")
    rows = {row["setting"]: (row["value"], row["from"]) for row in bare.json(*args)}
    assert rows["broker"] == ("kafka://b:9092?sasl.password=***", f"{filed}, line 1")
    assert rows["relay.workers"] == (3, f"{filed}, line 2")
    assert rows["store"][1] == "OUTRIDER_STORE"
    assert rows["schema"] == ("shop", "--schema")
    assert rows["relay.lease_seconds"] == (15.0, "default")
    table = bare(*args).stdout
    assert "relay.workers" in table
    assert "hunter2" not in table


def test_a_file_that_is_wrong_stops_a_command_with_its_line(bare: Shell, tmp_path: Path) -> None:
    filed = tmp_path / "outrider.yaml"
    filed.write_text("relay:\n  lease_second: 4\n")
    assert "line 2: relay.lease_second" in bare("relay", "--config", str(filed), code=2).stderr
    filed.write_text("store: postgresql://app:hunter2@db/shop\n")
    output = bare.json("events", "list", "--config", str(filed), code=2)["error"]
    assert "holds a password" in output
    assert "hunter2" not in output


def test_payloads_are_shown_only_when_asked_for(shell: Shell) -> None:
    (event_id,) = shell.stage("a")
    assert "payload" not in shell.json("events", "list")[0]
    assert "payload" not in shell.json("events", "show", event_id)
    assert shell.json("events", "show", event_id, "--payload")["payload"] == {"secret": "a"}


def test_listings_are_tables_for_people(shell: Shell) -> None:
    (event_id,) = shell.stage("a")
    assert event_id in shell("events", "list").stdout
    assert "order.placed" in shell("events", "show", event_id).stdout
    assert "no events match" in shell("events", "list", "--topic", "other").stdout
    assert "no dead letters match" in shell("dead-letters", "list").stdout


def test_a_dead_letter_blocks_its_stream_until_it_is_replayed(shell: Shell) -> None:
    first, second, other = shell.stage("a", "a", "b")
    shell("dead-letters", "add", first, "--reason-text", "looks wrong", "--policy", "block")
    assert shell.json("relay", "--until-empty", code=1) == {"confirmed": 1, "dead_lettered": 0, "waiting": 1}
    assert [row["event_id"] for row in shell.json("events", "list")] == [second]
    shown = shell.json("dead-letters", "show", first)
    assert (shown["reason"], shown["failure"]["error"]) == ("by_hand", "looks wrong")
    assert shell.json("dead-letters", "replay", first) == {"replayed": 1}
    assert shell.json("relay", "--until-empty")["confirmed"] == 2
    sent = [row["event_id"] for row in shell.json("events", "list", "--state", "sent")]
    assert sent.index(second) < sent.index(first)
    assert other in sent


def test_a_stream_goes_on_after_its_dead_letter_is_discarded(shell: Shell) -> None:
    first, second = shell.stage("a", "a")
    shell("dead-letters", "add", first)
    assert shell.json("dead-letters", "discard", "--all", "--yes") == {"discarded": 1}
    shell("relay", "--until-empty")
    assert shell.json("events", "show", second)["state"] == "sent"
    shell("events", "show", first, code=1)


def test_an_edited_dead_letter_is_replayed_with_its_new_content_and_the_change_is_logged(
    shell: Shell, tmp_path: Path
) -> None:
    (event_id,) = shell.stage("a")
    shell("dead-letters", "add", event_id)
    payload = tmp_path / "payload.json"
    payload.write_text('{"fixed": true}')
    args = ("dead-letters", "edit", event_id)
    changes = ("--payload-file", str(payload), "--header", "ticket=T-1", "--topic", "orders.fixed")
    assert shell.json(*args, *changes) == {"edited": event_id}
    shown = shell.json("dead-letters", "show", event_id, "--payload")
    assert (shown["payload"], shown["headers"], shown["topic"]) == (
        {"fixed": True},
        {"ticket": "T-1"},
        "orders.fixed",
    )
    with closing(sqlite3.connect(shell.path)) as conn:
        assert conn.execute("SELECT verb FROM outbox_operation ORDER BY id").fetchall()[-1] == ("edit",)
    shell("dead-letters", "replay", event_id)
    shell("relay", "--until-empty")
    assert shell.json("events", "show", event_id)["topic"] == "orders.fixed"


def test_an_edit_follows_the_rules_of_staging(shell: Shell, tmp_path: Path) -> None:
    (event_id,) = shell.stage("a")
    args = ("dead-letters", "edit", event_id)
    assert "no dead letter" in shell(*args, "--topic", "orders.fixed", code=1).stderr
    shell("dead-letters", "add", event_id)
    payload = tmp_path / "payload.json"
    payload.write_text('{"total": NaN}')
    for changes, words in (
        ((), "say what to change"),
        (("--payload-file", str(payload)), "payload.total: nan is not JSON"),
        (("--payload-file", "no/such.json"), "cannot read no/such.json"),
        (("--header", "ticket"), "write NAME=VALUE"),
        (("--header", "gapless=true"), "reserved for outrider"),
        (("--topic", "no topic"), "characters that brokers reject"),
    ):
        assert words in shell(*args, *changes, code=2).stderr
    assert shell.json("dead-letters", "show", event_id)["topic"] == "orders"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        (("dlq", "ls"), ("dead-letters", "list")),
        (("events", "ls"), ("events", "list")),
        (("inbox", "ls"), ("inbox", "list")),
    ],
)
def test_a_list_has_an_alias_that_help_does_not_list(
    shell: Shell, alias: tuple[str, str], name: tuple[str, str]
) -> None:
    for event_id in shell.stage("a", "b")[:1]:
        shell("dead-letters", "add", event_id)
    assert shell.json(*alias) == shell.json(*name)
    commands = [line.split()[1] for line in shell(name[0], "--help", COLUMNS="200").stdout.splitlines() if "│" in line]
    assert "list" in commands
    assert "ls" not in commands


def test_dead_letters_are_grouped_by_reason_and_topic(shell: Shell) -> None:
    for event_id in shell.stage("a", "b"):
        shell("dead-letters", "add", event_id)
    assert shell.json("dead-letters", "groups") == [{"reason": "by_hand", "topic": "orders", "count": 2}]
    assert "by_hand" in shell("dead-letters", "groups").stdout


def test_a_dry_run_shows_what_would_be_replayed_and_changes_nothing(shell: Shell) -> None:
    first, second = shell.stage("a", "b")
    shell("dead-letters", "add", first)
    shell("dead-letters", "add", second)
    found = shell.json("dead-letters", "replay", "--key", "a", "--dry-run")
    assert [row["event_id"] for row in found["would_replay"]] == [first]
    assert len(shell.json("dead-letters", "list")) == 2


def test_a_replay_by_filter_takes_only_what_matches_at_the_rate_given(shell: Shell) -> None:
    for event_id in shell.stage("a", "b", "c"):
        shell("dead-letters", "add", event_id)
    assert shell.json(
        "dead-letters", "replay", "--reason", "by_hand", "--topic", "orders", "--rate", "500", "--yes"
    ) == {"replayed": 3}
    assert shell.json("dead-letters", "replay", "--event-type", "order.paid") == {"replayed": 0}


def test_a_final_command_or_one_for_many_needs_yes_without_a_terminal(shell: Shell) -> None:
    [event_id] = shell.stage("a")
    shell("dead-letters", "add", event_id)
    for command in (("discard", "--all"), ("discard", event_id), ("replay", "--topic", "orders")):
        assert "add --yes" in shell("dead-letters", *command, code=2).stderr
        assert "add --yes" in shell("dead-letters", *command, "--json", code=2).stderr
    assert len(shell.json("dead-letters", "list")) == 1


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2#x@127.0.0.1:5432/shop",
        "postgresql://u:hunter2/x@127.0.0.1:5432/shop",
        "postgresql://u:p@hunter2/w@127.0.0.1/shop",
        "postgresql://u:hunter2@127.0.0.1:99999/shop",
        "postgresql://u:hunter2@[::1/shop",
        "host=127.0.0.1 password=hunter2",
    ],
)
def test_a_url_that_cannot_be_read_is_rejected_without_repeating_its_secret(bare: Shell, url: str) -> None:
    for command in (("events", "list"), ("db", "migrate"), ("db", "status")):
        output = bare(*command, "--store", url, code=2)
        assert "hunter2" not in output.stderr + output.stdout
        assert "Traceback" not in output.stderr


@pytest.mark.parametrize("schema", ["Bad-Name", "x; drop table y", "1st"])
def test_a_schema_name_that_is_no_identifier_is_rejected_before_it_reaches_a_server(bare: Shell, schema: str) -> None:
    url = "postgresql://u@127.0.0.1:1/shop"
    for command in (("events", "list"), ("dead-letters", "list"), ("db", "plan")):
        assert "not allowed" in bare(*command, "--store", url, "--schema", schema, code=2).stderr


def test_replaying_needs_a_choice_and_only_one(shell: Shell) -> None:
    assert "--all" in shell("dead-letters", "replay", code=2).stderr
    assert "in one way" in shell("dead-letters", "replay", "--all", "--key", "a", code=2).stderr


def test_a_dead_letter_that_is_not_there_is_a_finding(shell: Shell) -> None:
    assert NOBODY in shell("dead-letters", "replay", NOBODY, code=1).stderr
    assert "outrider dead-letters list" in shell("dead-letters", "show", NOBODY, code=1).stderr
    assert "no event" in shell("dead-letters", "add", NOBODY, code=1).stderr


def test_an_event_that_has_left_cannot_be_dead_lettered(shell: Shell) -> None:
    (event_id,) = shell.stage("a")
    shell("relay", "--until-empty")
    assert "was not moved" in shell("dead-letters", "add", event_id, code=1).stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["events", "show", "12"], "outrider events list"),
        (["events", "list", "--state", "pendign"], "did you mean pending?"),
        (["events", "list", "--state", "dead_letter"], "outrider dead-letters list"),
        (["dead-letters", "list", "--reason", "poison"], "did you mean poison_message?"),
        (["dead-letters", "add", NOBODY, "--policy", "wait"], "block"),
        (["lifecycle", "failde"], "did you mean failed?"),
        (["relay", "--lease-seconds", "4"], "less than half of lease_seconds"),
        (["relay", "--log-level", "loud"], "valid: debug"),
        (["events", "list", "--store", "sqlit:///x"], "did you mean sqlite://?"),
        (["events", "list", "--store", "sqlite://x"], "sqlite:///relative/path"),
        (["events", "list", "--store", "mysql://u:hunter2@db/x"], "valid: sqlite://, postgresql://, postgres://"),
        (["relay", "--broker", "kafak://x"], "valid: embedded://, null://"),
        (["relay", "--broker", "embedded:///x?exchange=a"], "embedded:// takes no options"),
        (["relay", "--processes", "65"], "up to 64"),
        (["events", "list", "--store", "postgresql://db/x?pooled=perhaps"], "pooled=true"),
        (["events", "list", "--store", "postgresql://db/x?connections_max=2"], "a whole number from 3 to 1000"),
        (["events", "list", "--store", "postgresql://db/x?connections_max=many"], "a whole number from 3 to 1000"),
        (["events", "list", "--config", "no/such.yaml"], "there is no file no/such.yaml"),
    ],
)
def test_a_wrong_use_exits_with_2_and_names_the_fix(shell: Shell, args: list[str], words: str) -> None:
    result = shell(*args, code=2)
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "hunter2" not in result.stderr
    error = shell.json(*args, code=2)
    assert error["exit"] == 2
    assert words in error["error"]


def test_typers_own_usage_errors_are_objects_too_when_json_is_asked_for(bare: Shell) -> None:
    assert bare.json("events", "list", "--nope", code=2)["exit"] == 2
    assert "--nope" in bare("events", "list", "--nope", code=2).stderr


def test_without_a_store_the_error_names_the_fix() -> None:
    result = CliRunner().invoke(app, ["events", "list"])
    assert result.exit_code == 2
    assert "OUTRIDER_STORE" in result.stderr


def test_a_store_that_was_never_migrated_says_so(bare: Shell) -> None:
    assert "outrider db migrate" in bare("events", "list", code=2).stderr


def test_a_misspelt_variable_stops_every_command(shell: Shell) -> None:
    result = shell("events", "list", code=2, OUTRIDER_LEASE_SECOND="4")
    assert "OUTRIDER_LEASE_SECONDS" in result.stderr


def test_a_server_that_does_not_answer_exits_with_3_and_hides_the_password(bare: Shell) -> None:
    pytest.importorskip("asyncpg")
    result = bare("events", "list", "--store", "postgresql://u:hunter2@127.0.0.1:1/x", code=3)
    assert "hunter2" not in result.stderr


@pytest.fixture
def broken() -> typer.Typer:
    """A command line of ours with a fault in it."""
    made = typer.Typer(cls=Group)

    @made.command()
    def fail() -> None:
        raise ZeroDivisionError("over postgresql://u:hunter2@db/x")

    made.command("other")(lambda: None)
    return made


def test_an_unexpected_error_says_how_to_see_its_traceback(broken: typer.Typer) -> None:
    output = CliRunner().invoke(broken, ["fail"])
    assert output.exit_code == 1
    assert output.stderr.startswith("outrider: ZeroDivisionError: over")
    assert "OUTRIDER_DEBUG=1" in output.stderr
    assert "Traceback" not in output.stderr


def test_the_traceback_of_an_error_is_shown_on_request_without_secrets(broken: typer.Typer) -> None:
    output = CliRunner().invoke(broken, ["fail"], env={"OUTRIDER_DEBUG": "1"})
    assert "Traceback" in output.stderr
    assert "in fail" in output.stderr
    assert "hunter2" not in output.stderr


def test_completed_and_failed_parts_of_a_command_are_both_printed(shell: Shell) -> None:
    (event_id,) = shell.stage("a")
    shell("dead-letters", "add", event_id)
    output = shell("dead-letters", "discard", event_id, NOBODY, "--yes", "--json", code=1)
    assert json.loads(output.stdout) == {"discarded": 1}
    error = json.loads(output.stderr)
    assert error["exit"] == 1
    assert NOBODY in error["error"]


def test_every_number_of_the_relay_is_explained_in_the_words_of_the_documentation(bare: Shell) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `relay\.(\w+)` \| ([^|]+ \| [^|]+) \|$", page, re.MULTILINE))
    for name in config.RELAY_NUMBERS:
        default, meaning = rows[name].split(" | ")
        assert number(name).help.lower() == f"{meaning.lower()}; {default} unless set."
    shown = " ".join(bare("relay", "--help", COLUMNS="200").stdout.split())
    assert all(number(name).help in shown for name in config.RELAY_NUMBERS)


def test_help_says_what_it_is_for_and_the_least_that_can_be_asked_for(bare: Shell) -> None:
    assert "outbox, inbox and sagas" in bare("--help", COLUMNS="200").stdout
    assert "500 at least" in bare("demo", "--help", COLUMNS="200").stdout


@pytest.mark.parametrize(
    ("driver", "url", "extra"),
    [("asyncpg", "postgresql://db/x", "postgres"), ("pymongo", "mongodb://db", "mongo")],
)
def test_a_missing_driver_names_the_extra(driver: str, url: str, extra: str) -> None:
    # In a process of its own: here the driver was imported long ago.
    program = f"""
import asyncio, sys
sys.modules[{driver!r}] = None
from outrider import app, errors
for opening in (app.open_store, app.open_inbox, app.open_sagas, app.open_schema):
    try:
        asyncio.run(opening({url!r}))
    except errors.UsageError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    said = f"the driver {driver} is not installed; run: pip install 'outrider[{extra}]'"
    assert done.stdout.splitlines() == [said] * 4


@pytest.mark.parametrize(
    ("command", "own", "absent"),
    [
        (["--version"], set(), {"asyncio", "rich.console", "outrider.config", "outrider.event"}),
        (["relay", "--help"], {"relay"}, {"outrider.inbox.inbox", "outrider.saga", "outrider.stores.sqlite"}),
        (["consume", "--help"], {"consume", "relay"}, {"outrider.saga", "outrider.stores.sqlite"}),
    ],
)
def test_a_command_imports_what_it_needs(command: list[str], own: set[str], absent: set[str]) -> None:
    program = f"""
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
sys.argv[1:] = {command!r}
from outrider.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    modules = set(done.stderr.split())
    assert {f"outrider.cli.{name}" for name in COMMANDS} & modules == {f"outrider.cli.{name}" for name in own}
    assert absent & modules == set()


def test_the_lifecycle_is_shown_as_table_diagram_and_answer(bare: Shell) -> None:
    assert "confirm_optimistic" in bare("lifecycle").stdout
    assert bare("lifecycle", "--mermaid").stdout.startswith("stateDiagram-v2")
    assert bare.json("lifecycle", "dead_letter")["allowed"] == {"replay": "pending", "resume": "parked"}
    assert "final" in bare("lifecycle", "sent").stdout
    assert {"transition", "from", "to", "when"} == set(bare.json("lifecycle")[0])
