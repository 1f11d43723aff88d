"""`outrider saga` on a SQLite store: its lists, its operator commands, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from typer.testing import CliRunner

from outrider import Event, Inbox, RetryPolicy
from outrider.app import open_schema
from outrider.cli import app
from outrider.cli.saga_operator import OperatorCommand, send_command
from outrider.saga.context import StepContext
from outrider.saga.definition.saga import Saga, SagaRegistry, saga_id_of
from outrider.saga.model import Claim, MessageKind, NewSagaMessage, Phase, SagaChange, SagaRecord
from outrider.saga.participant import Participant
from outrider.saga.planner.actions import Claimed, Input, Raised, RejectedResult, Succeeded
from outrider.saga.planner.planner import advance
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.stores.sqlite import SqliteSagas
from outrider.testing import ManualClock

LEASE_SECONDS = 15.0
HERE = __name__


@dataclass
class Order:
    order_id: str


order = Saga("order", Order)
refund = Saga("refund", Order)
newer = Saga("refund", Order, version=2)


@order.local()
async def create(run: StepContext[Order], tx: Any) -> None:
    """Make an order."""


@create.compensate()
async def cancel(run: StepContext[Order], tx: Any) -> None:
    """Take it back."""


@order.call(retry=RetryPolicy(max_attempts=2))
async def charge(run: StepContext[Order]) -> None:
    """Take the money."""


order.request("stock.reserve", topic="stock", reply="stock.reserved", name="reserve")
refund.sleep(60, name="rest")
newer.sleep(90, name="rest")
sagas = SagaRegistry(order, refund, newer)

leaving = Saga("leaving", Order)
inbox = Inbox()
stock = Participant("stock")


@leaving.call()
async def leave(run: StepContext[Order]) -> None:
    """Ask this very process to stop, in the middle of a step."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)


@inbox.handler("stock.reserve", consumer="stock", topic="stock")
async def reserve(command: Event, tx: Any) -> None:
    """Answer the command of an order."""
    await stock.execute(tx, command, lambda *_: Event("stock.reserved", {}))


only_refunds = [refund]
no_sagas = "order"

ORDER_ID = saga_id_of("order", "A-7")
LOST = "unknown whether it happened before; it raised"


async def save(store: SqliteSagas, claimed: SagaRecord, inputs: Sequence[Input]) -> bool:
    """Save the plan for the inputs; return whether the saga is released with it."""
    saga_id, epoch = claimed.instance.saga_id, claimed.instance.epoch
    async with store.transaction() as tx:
        record = await store.load(tx, saga_id)
        assert record
        saga = sagas.find(record.instance.saga_type, record.instance.definition_version)
        assert saga
        plan = advance(saga.definition, record, inputs, random.Random(1))
        written = plan.instance, plan.entries, plan.taken, plan.seen, plan.notes, plan.release, plan.wake_seconds
        await store.save(tx, Claim("w", saga_id, epoch), SagaChange(*written), LEASE_SECONDS)
    return plan.release


class Shell:
    """A store with sagas, a worker made by hand who lives in the past, and a person at the command line."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.url = f"sqlite:///{self.path}"
        self.clock = ManualClock(datetime.now(UTC) - timedelta(hours=1))

    def __call__(self, *args: str, code: int = 0) -> Any:
        return self.do("saga", *args, code=code)

    def do(self, *args: str, code: int = 0) -> Any:
        """Run any command on the store and the log beside it."""
        variables = {"OUTRIDER_STORE": self.url, "OUTRIDER_BROKER": f"embedded:///{self.path.with_name('log.db')}"}
        result = CliRunner().invoke(app, [*args], env=variables)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    def json(self, *args: str, code: int = 0) -> Any:
        result = self(*args, "--json", code=code)
        return json.loads(result.stdout if code == 0 else result.stderr)

    def start(self, saga: Saga[Order], correlation_id: str = "A-7") -> None:
        async def started(store: SqliteSagas) -> None:
            async with store.transaction() as tx:
                assert await store.start(tx, saga.new(Order(correlation_id), correlation_id))

        self._with_store(started)

    def turn(self, *inputs: Input) -> None:
        """Let the worker take what is due, tell it, and save what the plan says."""

        async def taken(store: SqliteSagas) -> None:
            records = await store.claim("w", sagas.versions, limit=10, lease_seconds=LEASE_SECONDS)
            for record in records:
                # A saga without work in progress was released by its first turn.
                await save(store, record, [Claimed()]) or await save(store, record, inputs)

        self._with_store(taken)
        self.clock.advance(seconds=LEASE_SECONDS + 1)

    def deliver(self, name: str) -> None:
        async def posted(store: SqliteSagas) -> None:
            async with store.transaction() as tx:
                await store.deliver(tx, [NewSagaMessage(ORDER_ID, MessageKind.REPLY, name, None, b'{"n": 1}', uuid4())])

        self._with_store(posted)

    def commands(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the operator commands in the mailbox of the saga, with their bodies."""
        return [
            (message["name"], message["body"]) for message in self.json("show", str(ORDER_ID), "--state")["messages"]
        ]

    def _with_store(self, work: Callable[[SqliteSagas], Awaitable[None]]) -> None:
        async def working() -> None:
            store = SqliteSagas(self.path, clock=self.clock)
            try:
                await work(store)
            finally:
                await store.close()

        asyncio.run(working())


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_") and name != "OUTRIDER_ACTOR"]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with nothing in it, to be copied."""
    made = Shell(tmp_path_factory.mktemp("installed"))
    asyncio.run(open_schema(made.url).migrate())
    return made.path


@pytest.fixture
def shell(tmp_path: Path, installed: Path) -> Shell:
    made = Shell(tmp_path)
    shutil.copy(installed, made.path)
    return made


@pytest.fixture
def failed(shell: Shell) -> Shell:
    """An order whose payment was lost with its worker once, and then raised twice; and a refund that rests."""
    shell.start(refund, "B-1")
    shell.start(order)
    shell.turn(Succeeded("create", Phase.ACTION))
    for _ in range(2):
        shell.turn(Raised("charge", Phase.ACTION, "connection refused"))
    return shell


@pytest.fixture
def over(shell: Shell) -> Shell:
    """An order that was rejected, and therefore compensated."""
    shell.start(order)
    shell.turn(RejectedResult("create", Phase.ACTION, "sold out"))
    assert shell.json("ls")[0]["status"] == "compensated"
    return shell


def test_without_sagas_nothing_is_listed(shell: Shell) -> None:
    assert shell.json("ls") == []
    assert "no sagas match" in shell("ls").stdout


def test_a_store_without_sagas_is_wrong_usage(tmp_path: Path) -> None:
    assert "outrider db migrate" in Shell(tmp_path).json("ls", code=2)["error"]


def test_those_that_need_attention_come_first_and_states_are_not_listed(failed: Shell) -> None:
    rows = failed.json("ls")
    assert [(row["saga_type"], row["status"], row["needs_attention"]) for row in rows] == [
        ("order", "failed", True),
        ("refund", "running", False),
    ]
    assert rows[0]["current_step"] == "charge"
    assert "state" not in rows[0]
    assert str(ORDER_ID) in failed("ls").stdout
    assert LOST in failed("ls").stdout


def test_sagas_are_filtered(failed: Shell) -> None:
    def found(*args: str) -> list[str]:
        return [row["correlation_id"] for row in failed.json("ls", *args)]

    assert found("--type", "refund") == found("--correlation-id", "B-1") == ["B-1"]
    assert found("--status", "failed") == found("--attention") == found("--limit", "1") == ["A-7"]
    assert found("--stuck", "600") == ["B-1"]
    assert found("--stuck", "7200") == found("--type", "parcel") == []
    assert "did you mean failed?" in failed.json("ls", "--status", "faild", code=2)["error"]


def test_one_saga_is_shown_with_its_journal_and_the_end_of_its_audit_log(failed: Shell) -> None:
    output = failed.json("show", str(ORDER_ID))
    assert [(entry["step"], entry["status"], entry["attempts"]) for entry in output["journal"]] == [
        ("create", "done", 1),
        ("charge", "failed", 2),
    ]
    assert output["journal"][1]["error"] == f"{LOST}: connection refused"
    assert output["audit"][0]["what"] == "started"
    assert output["audit"][-1]["what"] == "became failed"
    assert [line["what"] for line in failed.json("show", str(ORDER_ID), "--audit", "1")["audit"]] == ["became failed"]
    assert failed.json("show", str(ORDER_ID), "--audit", "0")["audit"] == []
    assert "state" not in output
    shown = failed("show", str(ORDER_ID)).stdout
    assert "connection refused" in shown
    assert "became failed" in shown


def test_the_state_and_the_bodies_of_messages_are_shown_on_request(failed: Shell) -> None:
    failed.deliver("stock.reserved")
    output = failed.json("show", str(ORDER_ID), "--state")
    assert output["state"] == {"order_id": "A-7"}
    assert [(message["name"], message["body"]) for message in output["messages"]] == [("stock.reserved", {"n": 1})]
    assert "body" not in failed.json("show", str(ORDER_ID))["messages"][0]
    assert "stock.reserved" in failed("show", str(ORDER_ID)).stdout


def test_a_saga_is_named_by_type_and_correlation_id_too(failed: Shell) -> None:
    assert failed.json("show", "A-7", "--type", "order")["saga_id"] == str(ORDER_ID)
    assert failed.json("why", "A-7", "--type", "order")["saga_id"] == str(ORDER_ID)


@pytest.mark.parametrize("command", [("show",), ("why",), ("retry",), ("graph", f"{HERE}:sagas")])
def test_a_saga_that_is_not_there_is_a_finding(failed: Shell, command: tuple[str, ...]) -> None:
    error = failed.json(*command, str(UUID(int=7)), code=1)["error"]
    assert error == f"there is no saga {UUID(int=7)}; see `outrider saga list`"
    error = failed.json(*command, "A-8", "--type", "order", code=1)["error"]
    assert "there is no order with the correlation id A-8; see `outrider saga list --type order`" in error


@pytest.mark.parametrize("command", ["show", "why", "retry", "compensate", "mark-done"])
def test_what_is_no_id_is_wrong_usage(failed: Shell, command: str) -> None:
    assert "or give a correlation id and --type" in failed.json(command, "A-7", code=2)["error"]


def test_explain_names_the_cause_and_the_commands_that_help(failed: Shell) -> None:
    output = failed.json("why", str(ORDER_ID))
    assert output["reasons"][0] == f"step charge has failed after 2 attempts: {LOST}: connection refused"
    assert [each["command"] for each in output["helps"]] == [
        f"outrider saga {verb} {ORDER_ID}" for verb in ("retry", "mark-done", "compensate")
    ]
    shown = failed("why", str(ORDER_ID)).stdout
    assert shown.startswith("order A-7 is failed")
    assert f"outrider saga mark-done {ORDER_ID}  counts the failed steps as done" in shown


def test_explain_says_that_no_worker_has_it_and_what_the_definitions_know(failed: Shell) -> None:
    resting = ("why", "B-1", "--type", "refund")
    assert "overdue since" in failed.json(*resting)["reasons"][-1]
    assert "No worker that holds version 1 of refund is running" in failed.json(*resting)["reasons"][-1]
    assert "step rest waits for an answer, an event or a time" in failed.json(*resting)["reasons"][0]
    known = failed.json(*resting, "--sagas", f"{HERE}:only_refunds")["reasons"]
    assert "step rest sleeps until" in known[0]
    strange = failed.json("why", str(ORDER_ID), "--sagas", f"{HERE}:only_refunds")["reasons"]
    assert "does not hold version 1 of order, so a worker that runs it leaves this saga alone" in strange[-1]


@pytest.mark.parametrize("verb", ["retry", "compensate", "mark-done"])
def test_an_operator_command_is_a_message_with_the_name_of_the_operator(failed: Shell, verb: str) -> None:
    assert failed.json(verb, str(ORDER_ID)) == {"command": verb.replace("-", "_"), "sent": 1, "sagas": [str(ORDER_ID)]}
    [(name, body)] = failed.commands()
    assert (name, body["actor"].startswith("cli:")) == (verb.replace("-", "_"), True)
    assert f"A-7: {verb} is sent; the next worker applies it" in failed(verb, "A-7", "--type", "order").stdout
    assert len(failed.commands()) == 2
    assert f"commanded {verb}" in failed("why", str(ORDER_ID)).stdout


async def test_an_operator_command_wakes_workers_that_listen() -> None:
    memory = MemoryStore(clock=ManualClock())
    store, new, woken = MemorySagas(memory), order.new(Order("A-7"), "A-7"), asyncio.Event()
    async with store.transaction() as tx:
        await store.start(tx, new)
    async with store.listen(woken.set):
        sent = await send_command(store, OperatorCommand("retry", "ann"), {new.saga_id: "A-7"}, None)
        assert sent.saga_ids == [new.saga_id]
        assert woken.is_set()


def test_the_next_worker_applies_an_operator_command_and_the_audit_log_says_so(failed: Shell) -> None:
    failed("compensate", str(ORDER_ID))
    failed.turn(Succeeded("create", Phase.COMPENSATION))
    output = failed.json("show", str(ORDER_ID))
    assert (output["status"], output["messages"]) == ("compensated", [])
    [answer] = [line for line in output["audit"] if line["what"] == "operator compensate"]
    assert answer["actor"].startswith("cli:")
    assert "compensates all steps" in answer["detail"]


@pytest.mark.parametrize("verb", ["retry", "compensate", "mark-done"])
def test_a_saga_that_has_ended_takes_no_operator_commands(over: Shell, verb: str) -> None:
    error = over.json(verb, str(ORDER_ID), code=1)["error"]
    assert f"{ORDER_ID} rejects the command {verb.replace('-', '_')}: it is compensated" in error
    assert over.commands() == []


def test_sagas_that_can_take_an_operator_command_get_it_and_the_others_are_reported(failed: Shell) -> None:
    result = failed("retry", "A-7", "A-8", "A-7", "--type", "order", "--json", code=1)
    assert json.loads(result.stdout)["sent"] == 1
    assert "no order with the correlation id A-8" in json.loads(result.stderr)["error"]
    assert len(failed.commands()) == 1


def test_a_definition_is_drawn(shell: Shell) -> None:
    assert shell("graph", f"{HERE}:order").stdout.startswith("flowchart TD\n    begin")
    output = shell.json("graph", f"{HERE}:sagas", "--type", "refund")
    assert (output["saga_type"], output["version"]) == ("refund", 2)
    assert shell.json("graph", f"{HERE}:sagas", "--type", "refund", "--version", "1")["version"] == 1
    assert "choose one with --type: order, refund" in shell.json("graph", f"{HERE}:sagas", code=2)["error"]
    assert "did you mean order?" in shell.json("graph", f"{HERE}:sagas", "--type", "ordr", code=2)["error"]
    missing = shell.json("graph", f"{HERE}:sagas", "--type", "refund", "--version", "3", code=2)["error"]
    assert "holds no refund version 3" in missing


def test_a_run_is_drawn_from_the_store(failed: Shell) -> None:
    output = failed.json("graph", f"{HERE}:sagas", str(ORDER_ID))
    assert (output["saga_id"], output["version"]) == (str(ORDER_ID), 1)
    assert "connection refused" in output["mermaid"]
    assert "class s1 failed" in failed("graph", f"{HERE}:sagas", "A-7", "--type", "order").stdout
    error = failed.json("graph", f"{HERE}:only_refunds", str(ORDER_ID), code=2)["error"]
    assert "does not hold version 1 of order" in error


@pytest.mark.parametrize("command", ["graph", "run"])
@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("shop.sagas", "write module:name, such as shop.sagas:sagas"),
        ("no_such_module:sagas", "there is no module no_such_module here"),
        (f"{HERE}:saga", f"did you mean {HERE}:sagas?"),
        ("json:sagas", "define some: sagas = outrider.saga.SagaRegistry(order)"),
        (f"{HERE}:no_sagas", "name a Saga, a list of them, or SagaRegistry"),
    ],
)
def test_what_names_no_sagas_is_wrong_usage(shell: Shell, command: str, target: str, hint: str) -> None:
    assert hint in shell.json(command, target, code=2)["error"]


QUIET = ("--until-idle", "0.3", "--log-level", "error")


def test_a_worker_runs_sagas_and_prints_their_outcome(shell: Shell) -> None:
    shell.start(order)
    counts = shell.json("run", f"{HERE}:order", *QUIET)
    assert counts.pop("moved") > 0
    assert counts == {"completed": 0, "compensated": 0, "failed": 0}
    assert shell.json("show", str(ORDER_ID))["current_step"] == "reserve"
    output = shell.json("why", str(ORDER_ID), "--sagas", f"{HERE}:sagas")["reasons"]
    assert output[0].startswith("waits for reply stock.reserved of step reserve, asked once since")
    shell.do("relay", "--until-empty", "--log-level", "error")
    shell.do("consume", f"{HERE}:inbox", *QUIET)
    shell.do("relay", "--until-empty", "--log-level", "error")
    assert "moved, 1 completed, 0 compensated, 0 failed" in shell("run", f"{HERE}:order", *QUIET).stdout
    assert shell.json("why", str(ORDER_ID))["reasons"][0].startswith("completed at")


def test_a_worker_with_a_relay_publishes_its_commands_and_gives_its_lanes_back(shell: Shell) -> None:
    shell.start(order)
    counts = shell.json("run", f"{HERE}:order", "--relay", *QUIET)
    assert (counts["published"], counts["failed"]) == (1, 0)
    replied = shell.do("consume", f"{HERE}:inbox", "--relay", *QUIET, "--json")
    assert json.loads(replied.stdout)["published"] == 1
    counts = shell.json("run", f"{HERE}:order", "--relay", *QUIET)
    assert (counts["published"], counts["completed"]) == (0, 1)
    with closing(sqlite3.connect(shell.path)) as conn:
        assert conn.execute("SELECT count(*) FROM outbox_relay").fetchone() == (0,)


def test_a_fatal_error_of_the_relay_ends_the_worker_with_the_exit_code_of_the_relay(shell: Shell) -> None:
    with closing(sqlite3.connect(shell.path)) as conn:
        conn.execute("ALTER TABLE outbox_relay RENAME TO gone")
    error = shell.json("run", f"{HERE}:order", "--relay", "--log-level", "error", code=2)["error"]
    assert error == json.loads(shell.do("relay", "--json", "--log-level", "error", code=2).stderr)["error"]


def test_a_worker_does_not_touch_versions_that_it_does_not_have(shell: Shell) -> None:
    shell.start(newer, "B-2")
    assert shell.json("run", f"{HERE}:only_refunds", *QUIET)["moved"] == 0
    assert shell.json("ls")[0]["status"] == "started"


def test_a_signal_lets_a_call_under_way_end(shell: Shell) -> None:
    shell.start(leaving)
    counts = shell.json("run", f"{HERE}:leaving", "--log-level", "error")
    assert counts["completed"] == 1
    assert shell.json("ls")[0]["owner"] is None


def test_several_workers_run_under_one_parent(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.path.with_name("nap.py").write_text(
        "from dataclasses import dataclass\n"
        "import outrider\n"
        "@dataclass\n"
        "class Nap:\n"
        "    order_id: str\n"
        "nap = outrider.Saga('nap', Nap)\n"
        "nap.sleep(0.01, name='rest')\n"
    )
    nap = Saga("nap", Order)
    nap.sleep(0.01, name="rest")
    shell.start(nap, "N-1")
    monkeypatch.chdir(shell.path.parent)
    shell("run", "nap:nap", "--processes", "2", *QUIET)
    assert [row["status"] for row in shell.json("ls")] == ["completed"]


def test_a_worker_needs_a_broker_only_if_there_are_replies(shell: Shell) -> None:
    def run(target: str, code: int) -> Any:
        result = CliRunner().invoke(app, ["saga", "run", target, *QUIET], env={"OUTRIDER_STORE": shell.url})
        assert result.exit_code == code, result.stderr
        return result

    assert "0 moved" in run(f"{HERE}:refund", 0).stdout
    assert "no broker given; pass --broker URL" in run(f"{HERE}:order", 2).stderr


def test_settings_that_cannot_work_are_wrong_usage(shell: Shell) -> None:
    error = shell.json("run", f"{HERE}:refund", "--lease-seconds", "2", code=2)["error"]
    assert "lower the one or raise the other" in error
    assert shell.json("run", f"{HERE}:refund", "--until-idle", "0", code=2)["exit"] == 2
