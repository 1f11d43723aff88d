"""`outrider saga` on a SQLite store: operator commands for many sagas, fields of the state, undelivered commands."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner

import outrider
from outrider import RetryPolicy
from outrider.app import open_schema, open_store
from outrider.cli import app
from outrider.outbox.model import Criteria
from outrider.saga import Saga, SagaRegistry, SagaWorker, StepContext
from outrider.saga.definition.saga import saga_id_of
from outrider.stores.sqlite import SqliteSagas

HERE = __name__
ORDER_ID = saga_id_of("order", "A-1")


@dataclass
class Order:
    order_id: str
    charge: str | None = None


order = Saga("order", Order)
parcel = Saga("parcel", Order)


@order.call(retry=RetryPolicy(max_attempts=1))
async def charge(run: StepContext[Order]) -> None:
    """Take the money from a bank that is away."""
    raise ConnectionError("the bank is away")


@order.local()
async def confirm(run: StepContext[Order], tx: Any) -> None:
    assert run.state.charge == "C-1"


parcel.request("parcel.send", topic="parcel", reply="parcel.sent", name="send")
sagas = SagaRegistry(order, parcel)


class Shell:
    """A store, a worker, and a person at the command line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        asyncio.run(open_schema(self.url).migrate())

    def __call__(self, *args: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, list(args), env={"OUTRIDER_STORE": self.url})
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result.stdout if code == 0 else result.stderr

    def json(self, *args: str, code: int = 0) -> Any:
        return json.loads(self(*args, "--json", code=code))

    def start(self, saga: Saga[Order], *names: str) -> None:
        """Start sagas, and let them come as far as they come."""

        async def started(store: SqliteSagas) -> None:
            async with store.transaction() as tx:
                for name in names:
                    await saga.start(tx, Order(name), correlation_id=name)

        self.do(started)
        self.run_once()

    def run_once(self) -> None:
        async def worked(store: SqliteSagas) -> None:
            worker = SagaWorker(store, sagas, outrider.stage)
            while await worker.run_once():
                await worker.rest()

        self.do(worked)

    def do(self, work: Callable[[SqliteSagas], Awaitable[None]]) -> None:
        async def done() -> None:
            store = SqliteSagas(self.path)
            try:
                await work(store)
            finally:
                await store.close()

        asyncio.run(done())

    def operator_commands(self, name: str) -> list[str]:
        return [message["name"] for message in self.json("saga", "show", name, "--type", "order")["messages"]]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_") and name != "OUTRIDER_ACTOR"]:
        monkeypatch.delenv(name)
    return Shell(tmp_path / "store.db")


@pytest.fixture
def failed(shell: Shell) -> Shell:
    """Three orders whose payment may have happened."""
    shell.start(order, "A-1", "A-2", "A-3")
    assert [row["needs_attention"] for row in shell.json("saga", "ls")] == [True] * 3
    return shell


@pytest.mark.parametrize("how", ["--attention", "--all"])
def test_an_operator_command_goes_to_all_sagas_of_a_type_that_it_helps(failed: Shell, how: str) -> None:
    output = failed.json("saga", "retry", how, "--type", "order", "--yes")
    assert output == {"command": "retry", "sent": 3, "found": 3, "limit": 1000}
    assert failed.operator_commands("A-2") == ["retry"]


def test_many_sagas_never_get_an_operator_command_without_a_yes(failed: Shell) -> None:
    assert "--yes" in failed("saga", "compensate", "--attention", "--type", "order", code=2)
    assert failed.operator_commands("A-1") == []


def test_an_operator_command_for_many_can_be_narrowed_to_a_step(failed: Shell) -> None:
    narrowed = ("saga", "retry", "--attention", "--type", "order", "--yes", "--step")
    assert failed.json(*narrowed, "confirm")["sent"] == 0
    assert failed.json(*narrowed, "charge")["sent"] == 3


def test_sagas_beyond_the_limit_are_reported(failed: Shell) -> None:
    output = failed("saga", "retry", "--attention", "--type", "order", "--yes", "--limit", "2", code=1)
    assert "only 2 were taken on" in output
    assert sum(failed.operator_commands(name) == ["retry"] for name in ("A-1", "A-2", "A-3")) == 2


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ((), "in one way"),
        (("A-1", "--attention", "--type", "order"), "in one way"),
        (("--attention", "--all", "--type", "order"), "in one way"),
        (("--attention",), "--type order"),
        (("A-1", "--type", "order", "--step", "charge"), "--attention"),
    ],
)
def test_a_choice_that_is_none_is_wrong_usage(shell: Shell, options: tuple[str, ...], hint: str) -> None:
    assert hint in shell("saga", "retry", *options, code=2)


def test_what_a_person_sets_is_in_the_state_that_the_next_step_gets(failed: Shell) -> None:
    named = ("saga", "mark-done", "A-1", "--type", "order")
    failed(*named, "--set", 'charge="C-1"', "--sagas", f"{HERE}:sagas")
    failed.run_once()
    shown = failed.json("saga", "show", str(ORDER_ID), "--state")
    assert (shown["status"], shown["state"]["charge"]) == ("completed", "C-1")
    [line] = [line for line in shown["audit"] if line["what"] == "operator mark_done"]
    assert line["detail"] == "counts as done: charge; set: charge"


@pytest.mark.parametrize("text", ["charge=C-1", "charge", "=1", "charge=NaN"])
def test_what_is_set_is_json(failed: Shell, text: str) -> None:
    assert "FIELD=JSON" in failed("saga", "mark-done", str(ORDER_ID), "--set", text, code=2)


@pytest.mark.parametrize(("text", "problem"), [("charge=7", "Order.charge"), ("charg=null", "no such field")])
def test_fields_that_do_not_fit_the_state_are_rejected_by_the_command_and_by_the_worker(
    failed: Shell, text: str, problem: str
) -> None:
    named = ("saga", "mark-done", str(ORDER_ID), "--set", text)
    assert problem in failed(*named, "--sagas", f"{HERE}:sagas", code=2)
    assert failed.operator_commands("A-1") == []
    failed(*named)
    failed.run_once()
    shown = failed.json("saga", "show", str(ORDER_ID))
    assert (shown["status"], shown["needs_attention"]) == ("failed", True)
    assert problem in shown["audit"][-1]["detail"]


def test_explain_says_that_a_command_never_left_since_no_relay_is_running(shell: Shell) -> None:
    shell.start(parcel, "P-1")
    output = shell.json("saga", "why", "P-1", "--type", "parcel")
    assert any("command parcel.send is still in the outbox, pending" in reason for reason in output["reasons"])
    assert any("no relay is running" in reason for reason in output["reasons"])
    assert output["helps"][0]["command"] == "outrider relay"
    [event] = output["outbox"]["events"]
    assert (event["event_type"], event["state"], output["outbox"]["relays"]) == ("parcel.send", "pending", 0)
    assert "in the outbox" in shell("saga", "show", "P-1", "--type", "parcel")


def test_explain_names_the_dead_letter_that_a_command_became(shell: Shell) -> None:
    shell.start(parcel, "P-1")
    [event] = shell.json("saga", "show", "P-1", "--type", "parcel")["outbox"]["events"]
    shell("dead-letters", "add", event["event_id"])
    output = shell("saga", "why", "P-1", "--type", "parcel")
    assert "the command parcel.send is in the dead letters" in output
    assert f"outrider dead-letters replay {event['event_id']}" in output


def test_explain_points_to_the_participant_once_the_command_has_left(shell: Shell) -> None:
    shell.start(parcel, "P-1")
    asyncio.run(_take_out(shell.url, saga_id_of("parcel", "P-1")))
    output = shell("saga", "why", "P-1", "--type", "parcel", "--sagas", f"{HERE}:sagas")
    assert "outrider inbox list --store" in output
    assert "outrider relay" not in output


async def _take_out(url: str, saga_id: UUID) -> None:
    """Let the outbox forget what is staged under the key of a saga, as if it had been delivered long ago."""
    store = await open_store(url)
    ids = [row["event_id"] for row in await store.admin.events(Criteria(key=str(saga_id)))]
    for event_id in ids:
        assert await store.admin.dead_letter(event_id, "test", {"kind": "by_hand", "error": "no"}, "skip")
    assert await store.admin.discard(ids, "test") == 1
    await store.close()
