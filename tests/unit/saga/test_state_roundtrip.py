"""The state from step to step: a changed state is read back equal, or the step fails and the stored state stays."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import pytest

from outrider.errors import InvalidState
from outrider.saga.model import Status
from outrider.saga.state.roundtrip import dump_state, load_state
from tests.support.saga_shop import Order, Shop, begun, local, order_saga, request


@dataclass
class Other:
    amount: int = 1


@dataclass
class Larger(Order):
    colour: str = "red"


@pytest.mark.parametrize("instead", [None, 5, Other(), Larger("A-7"), {"order_id": "A-7"}], ids=repr)
@pytest.mark.parametrize("kind", ["call", "local", "reply"])
async def test_a_step_that_leaves_something_else_than_the_state_fails_at_once_and_what_is_stored_stays(
    kind: str, instead: Any
) -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log)
    if kind == "reply":

        @request(saga).on("stock.reserved")
        def reserved(run: Any, reply: Any) -> None:
            run.state = instead

    else:

        async def replace(run: Any, *tx: Any) -> None:
            log.append("replace")
            run.state = instead

        saga.call()(replace) if kind == "call" else saga.local()(replace)
    shop = Shop(saga)
    saga_id = await begun(shop, saga, amount=12)
    for command in await shop.sent():
        await shop.answer(command, "stock.reserved")
        await shop.works()
    instance = (await shop.shown(saga_id)).instance
    assert instance.status is Status.FAILED
    assert "is not Order, which this saga keeps; change its fields" in (instance.last_error or "")
    assert json.loads(instance.state)["amount"] == 12
    assert log.count("replace") <= 1


async def test_a_new_state_that_a_step_assigns_is_kept_if_it_is_of_the_type() -> None:
    saga = order_saga()

    @saga.call()
    async def charge(run: Any) -> None:
        run.state = Order("A-7", 13)

    shop = Shop(saga)
    assert (await shop.state(await begun(shop, saga)))["amount"] == 13


@dataclass
class Loose:
    order_id: str
    weight: float = 1.0
    placed_at: datetime = field(default=datetime(2030, 1, 1, tzinfo=UTC))
    limit: ClassVar[int] = 5
    status = "new"

    def __post_init__(self) -> None:
        self._upper = self.order_id.upper()

    @cached_property
    def length(self) -> int:
        return len(self.order_id)


def loose(**attributes: Any) -> Loose:
    state = Loose("a")
    for name, value in attributes.items():
        setattr(state, name, value)
    return state


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("status", "paid", "declares no such field"),
        ("limit", 7, "declares no such field"),
        ("_token", "t", "declares no such field"),
        ("_upper", "B", "'B' would come back as 'A'"),
        ("weight", 2**53 + 1, "has more digits than a float keeps"),
        ("weight", 10**5000, "is not float"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_lost_is_rejected_with_its_path(name: str, value: Any, problem: str) -> None:
    state = loose(**{name: value})
    with pytest.raises(InvalidState) as caught:
        load_state(Loose, b'{"order_id": "a"}').dump(state)
    assert caught.value.path == f"Loose.{name}"
    assert problem in str(caught.value)
    with pytest.raises(InvalidState):
        dump_state(Loose, state)


def test_what_a_class_makes_again_by_itself_is_not_lost() -> None:
    state = loose(weight=3, placed_at=datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")))
    assert state.length == 1
    assert json.loads(dump_state(Loose, state))["placed_at"] == "2020-10-25T02:30:00+01:00"


@dataclass
class Doubling:
    amount: int

    def __post_init__(self) -> None:
        self.amount *= 2


def test_a_class_that_changes_its_fields_each_time_it_is_made_is_rejected_at_the_start() -> None:
    with pytest.raises(InvalidState, match=r"Doubling\.amount: 4 would come back as 8"):
        dump_state(Doubling, Doubling(2))


@dataclass
class Line:
    article: str


@dataclass
class Basket:
    basket_id: str
    lines: list[Line] = field(default_factory=list)
    first: Line | None = None


NEWER = {
    "basket_id": "A-7",
    "colour": "red",
    "first": {"article": "a", "gift": True},
    "lines": [{"article": "a", "gift": True}],
}


def test_fields_that_this_definition_does_not_know_are_kept_as_they_are() -> None:
    before = load_state(Basket, json.dumps(NEWER).encode())
    assert json.loads(before.dump(before.state)) == NEWER
    before.state.basket_id = "A-8"
    before.state.first = Line("b")
    changed = {**NEWER, "basket_id": "A-8", "first": {"article": "b", "gift": True}}
    assert json.loads(before.dump(before.state)) == changed


def test_a_list_that_holds_what_is_not_known_here_is_not_changed() -> None:
    before = load_state(Basket, json.dumps(NEWER).encode())
    before.state.lines.append(Line("b"))
    with pytest.raises(InvalidState, match=r"Basket\.lines\[0\]\.gift: it is stored, is not known here"):
        before.dump(before.state)
    before.state.lines.clear()
    with pytest.raises(InvalidState, match=r"Basket\.lines\[0\]\.gift"):
        before.dump(before.state)


def test_a_field_that_was_added_is_stored_with_its_default() -> None:
    before = load_state(Basket, b'{"basket_id": "A-7"}')
    assert json.loads(before.dump(before.state)) == {"basket_id": "A-7", "lines": [], "first": None}


async def test_workers_with_and_without_a_new_field_of_the_state_take_turns_at_one_saga() -> None:
    newer, older = Shop(deployed(Larger)), deployed(Order)
    saga_id = await newer.start(next(iter(newer.sagas)), Larger("A-7", colour="blue"))
    await newer.works()
    [command] = await newer.sent()
    newer.sagas = type(newer.sagas)(older)
    await newer.answer(command, "stock.reserved")
    await newer.works(newer.new_worker(1))
    state = await newer.state(saga_id)
    assert await newer.status(saga_id) is Status.COMPLETED
    assert (state["colour"], state["amount"]) == ("blue", 2)


def deployed(state_type: Any) -> Any:
    saga = type(order_saga())("order", state_type)

    @saga.call()
    async def first(run: Any) -> None:
        run.state.amount += 1

    request(saga)

    @saga.call()
    async def second(run: Any) -> None:
        run.state.amount += 1

    return saga
