"""Models inside a saga's state: a value that a model would lose is rejected with its path."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from outrider.errors import InvalidState
from outrider.saga.state.codec import check_type
from outrider.saga.state.roundtrip import dump_state, load_state

pydantic: Any = pytest.importorskip("pydantic", reason="it is no dependency of ours")


class Base(pydantic.BaseModel):  # type: ignore[misc]
    number: int = 1


class Sub(Base):
    more: int = 0


class Secret(pydantic.BaseModel):  # type: ignore[misc]
    password: pydantic.SecretStr | None = None


class Revealed(Secret):
    @pydantic.field_serializer("password")  # type: ignore[untyped-decorator]
    def reveal(self, value: Any) -> Any:
        return value and value.get_secret_value()


class Excluding(pydantic.BaseModel):  # type: ignore[misc]
    token: str | None = pydantic.Field(default=None, exclude=True)


class Nested(pydantic.BaseModel):  # type: ignore[misc]
    inner: list[Excluding] | None = None


class Model(pydantic.BaseModel):  # type: ignore[misc]
    one: Base = Base()
    price: float | None = None
    extra: Any = None
    _seen: int = 0


@dataclass
class Holding:
    model: Model | None = None


@pytest.mark.parametrize(
    ("kind", "path"),
    [(Secret, "Secret.password"), (Excluding, "Excluding.token"), (Nested, "Excluding.token")],
)
def test_a_model_that_leaves_fields_out_or_masks_them_is_rejected_when_the_saga_is_written(
    kind: Any, path: str
) -> None:
    with pytest.raises(InvalidState) as caught:
        check_type(kind)
    assert caught.value.path == path


def test_a_model_that_reveals_its_secret_may_keep_it() -> None:
    check_type(Revealed)
    stored = dump_state(Revealed, Revealed(password="hunter2"))
    secret: Any = load_state(Revealed, stored).state.password
    assert secret.get_secret_value() == "hunter2"


def model(**attributes: Any) -> Any:
    made = Model()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("one", Sub(more=7)),
        ("price", float("nan")),
        ("extra", (1, 2)),
        ("extra", float("nan")),
        ("extra", datetime(2030, 1, 1, tzinfo=UTC)),
        ("_seen", 9),
    ],
)
def test_what_a_model_would_lose_is_rejected_with_its_path_even_if_its_text_is_the_same(name: str, value: Any) -> None:
    stored = dump_state(Model, Model())
    with pytest.raises(InvalidState, match=rf"Model\.{name}: .* would come back as"):
        load_state(Model, stored).dump(model(**{name: value}))
    with pytest.raises(InvalidState, match=rf"Holding\.model\.{name}: .* would come back as"):
        dump_state(Holding, Holding(model(**{name: value})))


def test_a_model_that_could_not_be_read_back_is_rejected_when_it_is_written() -> None:
    with pytest.raises(InvalidState, match="cannot be read back"), pytest.warns(UserWarning, match="serializer"):
        dump_state(Base, model_of_nonsense())


def model_of_nonsense() -> Any:
    made: Any = Base()
    made.number = "nonsense"
    return made


def test_a_model_comes_back_as_it_was() -> None:
    state = Holding(model(price=1.5, extra={"tags": ["a"]}))
    assert load_state(Holding, dump_state(Holding, state)).state == state
