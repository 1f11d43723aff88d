"""A saga's state: a value is read back equal, or is rejected with its path."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NewType, Optional
from uuid import UUID

import pytest

from outrider.errors import InvalidState, UsageError
from outrider.saga.state.codec import check_type, decode, encode

OrderId = NewType("OrderId", str)


class Colour(StrEnum):
    RED = "red"


class Size(IntEnum):
    LARGE = 3


class Odd(Enum):
    PAIR = (1, 2)


@dataclass(frozen=True)
class Line:
    article: str
    price: Decimal
    colours: tuple[Colour, ...] = ()


@dataclass
class Node:
    name: str
    children: list[Node] = field(default_factory=list)


@dataclass
class Everything:
    order_id: OrderId
    number: UUID
    placed_at: datetime
    day: date
    lines: list[Line]
    by_name: dict[str, Line | None]
    pair: tuple[int, str]
    tree: Node
    size: Size = Size.LARGE
    weight: float = 1.5
    paid: bool = False
    way: Literal["air", "sea", 3] = "air"
    either: int | str | None = None
    loose: Any = None
    bare: list = field(default_factory=list)  # type: ignore[type-arg]
    old: Optional[str] = None  # noqa: UP045
    count: int = field(default=0, init=False)
    limit: ClassVar[int] = 5


def everything(**changes: Any) -> Everything:
    state = Everything(
        order_id=OrderId("Å-7 \N{GRINNING FACE}"),
        number=UUID(int=7),
        placed_at=datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=timezone(timedelta(hours=2))),
        day=date(2030, 1, 2),
        lines=[Line("a", Decimal("1.10"), (Colour.RED,)), Line("b", Decimal("1E+3"))],
        by_name={"a": Line("a", Decimal(0)), "": None},
        pair=(1, "x"),
        tree=Node("root", [Node("leaf")]),
        loose={"a": [1, 1.5, None, True, "x"]},
        bare=[{"x": 1}],
    )
    state.count = 4
    return dataclasses.replace(state, **changes)


def through_json(state: Any) -> Any:
    return decode(type(state), encode(state))


def test_everything_that_can_be_annotated_comes_back_equal_and_of_its_type() -> None:
    state = everything()
    state.count = 4
    back = through_json(state)
    assert back == state
    assert str(back.lines[0].price) == "1.10"
    assert isinstance(back.lines[0].colours[0], Colour)
    assert isinstance(back.size, Size)
    assert isinstance(back.pair, tuple)
    assert back.placed_at.utcoffset() == timedelta(hours=2)


@pytest.mark.parametrize("value", [5, "5", None])
def test_scalars_that_json_tells_apart_may_share_a_field(value: Any) -> None:
    back = through_json(everything(either=value)).either
    assert (type(back), back) == (type(value), value)


def test_the_state_is_compact_json_that_people_can_read() -> None:
    assert encode(Line("é", Decimal("1.10"), (Colour.RED,))) == (
        '{"article":"é","price":"1.10","colours":["red"]}'.encode()
    )


def test_a_float_that_the_database_wrote_without_a_point_is_still_a_float() -> None:
    stored = json.loads(encode(everything())) | {"weight": 10**22}
    back = decode(Everything, json.dumps(stored).encode())
    assert (type(back.weight), back.weight) == (float, 1e22)


def endless() -> Node:
    node = Node("a")
    node.children.append(node)
    return node


def undeclared() -> Everything:
    state = everything()
    state.charge = "ch_1"  # type: ignore[attr-defined]
    return state


@dataclass(frozen=True)
class Gift(Line):
    to: str = ""


@pytest.mark.parametrize(
    ("state", "path", "problem"),
    [
        (everything(weight=float("nan")), "Everything.weight", "nan is not JSON"),
        (everything(weight=10**400), "Everything.weight", "is not float"),
        (everything(weight="1"), "Everything.weight", "'1' is not float"),
        (everything(size=3), "Everything.size", "3 is not Size"),
        (everything(paid=1), "Everything.paid", "1 is not bool"),
        (everything(order_id=None), "Everything.order_id", "None is not str"),
        (everything(order_id="\0"), "Everything.order_id", "NUL"),
        (everything(order_id="\ud800"), "Everything.order_id", "surrogate"),
        (everything(number="x"), "Everything.number", "'x' is not UUID"),
        (everything(placed_at=datetime(2030, 1, 1)), "Everything.placed_at", "naive"),  # noqa: DTZ001
        (everything(placed_at=date(2030, 1, 1)), "Everything.placed_at", "is not datetime"),
        (everything(day=datetime(2030, 1, 1, tzinfo=UTC)), "Everything.day", "is not date"),
        (everything(lines=[Line("a", Decimal("NaN"))]), "Everything.lines[0].price", "NaN is not a number"),
        (everything(lines=[Line("a", 1.5)]), "Everything.lines[0].price", "1.5 is not Decimal"),  # type: ignore[arg-type]
        (everything(lines=(Line("a", Decimal(1)),)), "Everything.lines", "is not list"),
        (everything(lines=[Gift("a", Decimal(1))]), "Everything.lines[0]", "is not Line"),
        (everything(by_name={"a": 5}), "Everything.by_name['a']", "5 is not Line"),
        (everything(by_name={5: None}), "Everything.by_name", "5 is not str"),
        (everything(pair=(1, "x", 2)), "Everything.pair", "is not a tuple of 2"),
        (everything(pair=("x", 1)), "Everything.pair[0]", "'x' is not int"),
        (everything(way="road"), "Everything.way", "'road' is not one of 'air', 'sea', 3"),
        (everything(either=1.5), "Everything.either", "1.5 is not int | str | None"),
        (everything(loose={"a": [1, {2}]}), "Everything.loose.a[1]", "{2} is not plain JSON"),
        (everything(loose=(1, 2)), "Everything.loose", "(1, 2) is not plain JSON"),
        (everything(loose={1: 2}), "Everything.loose", "1 is not str"),
        (everything(loose=Colour.RED), "Everything.loose", "is not plain JSON"),
        (everything(tree=endless()), "Everything", "cannot be written as JSON"),
        (undeclared(), "Everything.charge", "declares no such field"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_would_not_come_back_is_rejected_with_its_path(state: Any, path: str, problem: str) -> None:
    with pytest.raises(InvalidState) as caught:
        encode(state)
    assert caught.value.path == path
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "path", "problem"),
    [
        ({"number": "x"}, "Everything.number", "the stored 'x' is not UUID"),
        ({"number": 5}, "Everything.number", "the stored 5 is not UUID"),
        ({"placed_at": "soon"}, "Everything.placed_at", "is not datetime"),
        ({"size": 4}, "Everything.size", "the stored 4 is not Size"),
        ({"weight": True}, "Everything.weight", "the stored True is not float"),
        ({"lines": {}}, "Everything.lines", "is not list"),
        ({"lines": [5]}, "Everything.lines[0]", "is not Line"),
        ({"lines": [{"article": "a", "price": "cheap"}]}, "Everything.lines[0].price", "is not Decimal"),
        ({"lines": [{"article": "a"}]}, "Everything.lines[0]", "missing 1 required positional argument: 'price'"),
        ({"pair": [1]}, "Everything.pair", "is not a tuple of 2"),
        ({"way": "road"}, "Everything.way", "is not one of"),
        ({"either": 1.5}, "Everything.either", "is not int | str | None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_stored_and_does_not_fit_is_rejected_with_its_path(change: Any, path: str, problem: str) -> None:
    stored = json.loads(encode(everything())) | change
    with pytest.raises(InvalidState) as caught:
        decode(Everything, json.dumps(stored).encode())
    assert caught.value.path == path
    assert problem in str(caught.value)
    assert "under its own version" in str(caught.value)


def test_what_is_not_json_is_rejected() -> None:
    with pytest.raises(InvalidState, match="what is stored is not JSON"):
        decode(Line, b"{")
    with pytest.raises(InvalidState, match=r"the stored \[\] is not Line"):
        decode(Line, b"[]")


def test_a_field_that_was_added_gets_its_default() -> None:
    assert decode(Line, b'{"article": "a", "price": "1"}') == Line("a", Decimal(1))


@dataclass
class Secretive:
    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise LookupError("a name, please")
        self._upper = self.name.upper()

    @cached_property
    def length(self) -> int:
        return len(self.name)


def test_what_a_class_derives_from_its_fields_is_derived_again() -> None:
    state = Secretive("a")
    assert state.length == 1
    back = through_json(state)
    assert (back, back._upper, back.length) == (state, "A", 1)


def test_an_error_of_the_class_at_loading_is_reported() -> None:
    with pytest.raises(InvalidState, match="a name, please"):
        decode(Secretive, b'{"name": ""}')


@dataclass
class WithBytes:
    data: bytes


@dataclass
class WithUnion:
    thing: Line | Node


@dataclass
class WithKeys:
    by_number: dict[int, str]


@dataclass
class WithOdd:
    odd: Odd


@dataclass
class WithUnknown:
    thing: Nowhere  # type: ignore[name-defined]  # noqa: F821


@dataclass
class WithInit:
    name: str
    secret: InitVar[str]


@dataclass
class Deep:
    inner: list[dict[str, tuple[WithBytes, ...] | None]]


@dataclass
class WithLiteral:
    data: Literal[b"x"]


@pytest.mark.parametrize(
    ("kind", "path", "problem"),
    [
        (WithBytes, "WithBytes.data", "the type bytes cannot be stored"),
        (Deep, "WithBytes.data", "the type bytes cannot be stored"),
        (WithUnion, "WithUnion.thing", "cannot be told apart"),
        (WithKeys, "WithKeys.by_number", "the type dict[int, str] cannot be stored"),
        (WithOdd, "WithOdd.odd", "values that are neither text nor whole numbers"),
        (WithLiteral, "WithLiteral.data", "not plain JSON"),
        (WithUnknown, "WithUnknown", "name 'Nowhere' is not defined"),
        (WithInit, "WithInit", "missing a required argument: 'secret'"),
        (dict, "dict", "neither a dataclass nor a pydantic model"),
        (Line("a", Decimal(1)), "Line", "neither a dataclass nor a pydantic model"),
    ],
)
def test_a_type_that_could_not_be_stored_is_rejected_with_its_field(kind: Any, path: str, problem: str) -> None:
    with pytest.raises(InvalidState) as caught:
        check_type(kind)
    assert caught.value.path.startswith(path)
    assert problem in str(caught.value)


@pytest.mark.parametrize("kind", [Everything, Node, Line, Secretive])
def test_a_type_that_can_be_stored_is_accepted_also_if_it_holds_itself(kind: type) -> None:
    check_type(kind)


def test_an_invalid_state_is_a_usage_error() -> None:
    assert issubclass(InvalidState, UsageError)


class Basket(SimpleNamespace):
    """Writes itself as pydantic's models do."""

    def model_dump_json(self, *, by_alias: bool, round_trip: bool) -> str:
        assert by_alias
        assert round_trip
        return json.dumps({"total": self.total})

    @classmethod
    def model_validate_json(cls, text: str) -> Basket:
        if not isinstance(total := json.loads(text)["total"], int):
            raise ValueError("the total is no number")
        return cls(total=total)


@dataclass
class Holder:
    basket: Basket | None


@pytest.mark.parametrize(
    "state", [Basket(total=5), Holder(Basket(total=5)), Holder(None)], ids=["itself", "inside", "none"]
)
def test_a_model_writes_and_reads_itself(state: Any) -> None:
    check_type(type(state))
    assert through_json(state) == state


def test_a_value_that_a_model_rejects_or_cannot_write_is_rejected_with_its_path() -> None:
    with pytest.raises(
        InvalidState, match=r"Holder\.basket: the model does not take what is stored \(the total is no number"
    ):
        decode(Holder, b'{"basket": {"total": "5"}}')
    with pytest.raises(InvalidState, match=r"Holder\.basket: 5 is not Basket"):
        encode(Holder(5))  # type: ignore[arg-type]
    with pytest.raises(InvalidState, match=r"Basket\.total: it contains a NUL"):
        encode(Basket(total="\0"))
    with pytest.raises(InvalidState, match=r"Basket\.total: nan is not JSON"):
        encode(Basket(total=float("nan")))


def test_a_pydantic_model_comes_back_equal() -> None:
    pydantic: Any = pytest.importorskip("pydantic", reason="it is no dependency of ours")
    aliased = (UUID, pydantic.Field(alias="id"))
    model = pydantic.create_model("Model", basket_id=aliased, total=(Decimal, ...))
    check_type(model)
    state = model(id=UUID(int=7), total=Decimal("1.10"))
    assert through_json(state) == state
    with pytest.raises(InvalidState, match="the model does not take what is stored"):
        decode(model, b'{"id": "x"}')
