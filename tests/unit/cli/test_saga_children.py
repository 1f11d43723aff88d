"""`outrider saga` shows parents and children, and says what a parent waits for."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.app import open_schema
from outrider.cli import app
from outrider.retry import RetryPolicy
from outrider.saga import Saga, SagaRegistry, StepContext
from outrider.stores.sqlite import SqliteSagas
from outrider.testing import ManualClock, SagaHarness

HERE = __name__


@dataclass
class Order:
    order_id: str


@dataclass
class Parcel:
    order_id: str


order, shipping = Saga("order", Order), Saga("shipping", Parcel)
order.child(shipping, input=lambda state: Parcel(state.order_id), name="ship")


@shipping.call(retry=RetryPolicy(max_attempts=1))
async def pack(context: StepContext[Parcel]) -> None:
    raise RuntimeError("no cardboard")


sagas, without_child = SagaRegistry(order, shipping), order
PARENT = order.new(Order("A-7"), "A-7").saga_id
CHILD = shipping.child_id(PARENT, "ship")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command on a store with an order whose child needs an operator."""
    for name in [name for name in os.environ if name.startswith("OUTRIDER_") and name != "OUTRIDER_ACTOR"]:
        monkeypatch.delenv(name)
    url = f"sqlite:///{tmp_path / 'store.db'}"

    async def fill() -> None:
        await open_schema(url).migrate()
        clock = ManualClock()
        store = SqliteSagas(tmp_path / "store.db", clock=clock)
        await SagaHarness(sagas, store, clock=clock).start(order, Order("A-7"), "A-7")
        await store.close()

    asyncio.run(fill())

    def do(*args: str, code: int = 0) -> str:
        broker = f"embedded:///{tmp_path / 'log.db'}"
        result = CliRunner().invoke(app, ["saga", *args], env={"OUTRIDER_STORE": url, "OUTRIDER_BROKER": broker})
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result.stdout if code == 0 else result.stderr

    return do


def test_the_list_names_the_parent_and_shows_the_children_of_one_saga(shell: Any) -> None:
    rows = json.loads(shell("list", "--json"))
    assert {row["saga_type"]: row["parent_id"] for row in rows} == {"order": None, "shipping": str(PARENT)}
    [child] = json.loads(shell("list", "--parent", str(PARENT), "--json"))
    assert (child["saga_id"], child["parent_step"], child["status"]) == (str(CHILD), "ship", "failed")
    assert str(PARENT) in shell("list", "--attention")
    assert "not a saga's id" in shell("list", "--parent", "A-7", code=2)


def test_a_parent_is_shown_with_its_children_and_a_child_with_its_parent(shell: Any) -> None:
    told = shell("show", str(PARENT))
    assert "children" in told
    assert str(CHILD) in told
    assert [child["saga_id"] for child in json.loads(shell("show", str(PARENT), "--json"))["children"]] == [str(CHILD)]
    assert json.loads(shell("show", str(CHILD), "--json"))["parent_id"] == str(PARENT)


@pytest.mark.parametrize("options", [(), ("--sagas", f"{HERE}:sagas")])
def test_explain_names_the_child_that_needs_an_operator(shell: Any, options: tuple[str, ...]) -> None:
    told = " ".join(shell("explain", str(PARENT), *options).split())
    assert f"waits for its child shipping version 1 ({CHILD})" in told
    assert "no cardboard" in told
    assert "needs an operator" in told
    assert f"outrider saga explain {CHILD}" in told


def test_a_worker_without_the_child_says_at_its_start_what_is_missing(shell: Any) -> None:
    told = " ".join(shell("run", f"{HERE}:without_child", code=2).split())
    assert "SagaRegistry(order, shipping)" in told
