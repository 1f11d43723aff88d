"""Schemas and the types that have some: what a payload may look like, and where it does not."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import msgspec
import pydantic
import pytest
from bson import ObjectId
from hypothesis import given
from hypothesis import strategies as st

from outrider import Event, UsageError
from outrider.outbox.validation import StagingRules, payload_text, validate_events
from outrider.payload import SchemaFolder, SchemaSet
from outrider.payload.conversion import json_schema_of
from outrider.payload.model import Version, parse_version, version_order
from outrider.payload.schemas import compile_schema, make_schema, source_of

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # A NUL and half a character are refused by databases.
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner)
    ),
    max_leaves=20,
)


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal
    colour: Colour | None = None


@dataclass(frozen=True)
class Order:
    order_id: UUID
    lines: list[Line]
    placed_at: datetime
    day: date
    kind: Literal["new", "repeat"] = "new"
    notes: dict[str, str] | None = None
    pair: tuple[int, str] = (1, "a")


class PydanticOrder(pydantic.BaseModel):
    order_id: UUID
    total: Decimal
    lines: list[Line] = []
    note: str = pydantic.Field("", alias="Note")


class StructOrder(msgspec.Struct, rename="camel"):
    order_id: UUID
    total: Decimal
    colour: Colour = Colour.RED


ORDER = Order(UUID(int=7), [Line("a", Decimal("1.50"), Colour.RED)], datetime(2030, 1, 2, tzinfo=UTC), date(2030, 1, 2))
MODELS = [ORDER, PydanticOrder(order_id=UUID(int=7), total=Decimal(3), Note=""), StructOrder(UUID(int=7), Decimal(3))]


def first_path(document: Any, payload: Any) -> str | None:
    found = compile_schema(make_schema("paid", 1, document))(payload)
    return found and found.path


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_staged_directly_and_fits_the_schema_of_its_own_type(model: Any) -> None:
    [staged] = validate_events([Event("paid", model)], StagingRules()).plain
    assert first_path(type(model), json.loads(staged.payload)) is None


@pytest.mark.parametrize("model", MODELS)
def test_the_schema_of_a_type_rejects_another_object(model: Any) -> None:
    assert first_path(type(model), {}) is not None


@given(JSON)
def test_any_json_value_survives_staging(value: Any) -> None:
    assert json.loads(payload_text(value, 10**9, "payload")) == value


def test_models_may_be_nested_in_a_plain_payload() -> None:
    text = payload_text({"order": ORDER, "colour": Colour.RED, "id": ObjectId("0" * 24)}, 10_000, "payload")
    found = json.loads(text)
    assert found["order"]["lines"] == [{"sku": "a", "price": "1.50", "colour": "red"}]
    assert (found["colour"], found["id"]) == ("red", "0" * 24)


@pytest.mark.parametrize("value", [7, UUID(int=7), ObjectId("0" * 24)])
def test_ids_of_an_application_are_kept_as_text(value: Any) -> None:
    event = Event("paid", {}, aggregate_id=value, key=value, saga_id=value)
    [staged] = validate_events([event], StagingRules()).plain
    assert (staged.aggregate_id, staged.key, staged.saga_id) == (str(value),) * 3


@pytest.mark.parametrize(
    ("document", "payload", "path"),
    [
        ({"required": ["total"]}, {}, "payload.total"),
        (
            {"properties": {"lines": {"items": {"required": ["sku"]}}}},
            {"lines": [{"sku": 1}, {}]},
            "payload.lines[1].sku",
        ),
        ({"properties": {"total": {"type": "integer"}}}, {"total": "12"}, "payload.total"),
        ({"additionalProperties": False}, {"extra": 1}, "payload"),
        (False, 1, "payload"),
    ],
)
def test_a_problem_has_the_path_of_its_field(document: Any, payload: Any, path: str) -> None:
    assert first_path(document, payload) == path


def test_a_problem_does_not_repeat_the_value() -> None:
    document = {"properties": {"email": {"enum": ["a"]}, "name": {"pattern": "^x"}}}
    for payload in ({"email": "canary"}, {"name": "canary"}):
        found = compile_schema(make_schema("paid", 1, document))(payload)
        assert found is not None
        assert "canary" not in found.text


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"type": "strin"}, "no valid JSON Schema"),
        ({"$ref": "https://shop.example/other"}, "no valid JSON Schema"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "is not JSON Schema 2020-12"),
        ({"pattern": "("}, "no valid JSON Schema"),
        ([], "a schema is a JSON object or a boolean"),
        (object, "has no schema"),
    ],
)
def test_a_document_that_is_no_schema_is_refused_at_once(document: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SchemaSet({"paid": {1: document}})


def test_a_folder_holds_a_file_for_each_version(tmp_path: Path) -> None:
    (tmp_path / "paid").mkdir()
    for version in ("1", "10", "2", "2.1.0"):
        (tmp_path / "paid" / f"{version}.json").write_text('{"$id": "https://shop.example/paid"}')
    folder = SchemaFolder(tmp_path)
    assert folder.versions("paid") == [1, 2, "2.1.0", 10]
    found = folder.find("paid", 2)
    assert found is not None
    assert found.uri == "https://shop.example/paid"
    assert folder.find("paid", 3) is None
    assert source_of(str(tmp_path)).event_types() == ["paid"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("1.json", "{", "1.json is not JSON"),
        ("1.json", '"text"', "a schema is a JSON object"),
        ("first.json", "{}", "'first' is no version"),
    ],
)
def test_a_broken_file_is_reported_with_its_name(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / "paid").mkdir()
    (tmp_path / "paid" / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        SchemaFolder(tmp_path)


def test_a_folder_that_is_absent_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        SchemaFolder(tmp_path / "absent")


def test_of_several_sources_the_first_that_has_a_schema_counts() -> None:
    both = source_of([{"paid": {1: {"required": ["a"]}}}, {"paid": {1: {}, 2: {}}, "sent": {1: {}}}])
    assert both is not None
    assert both.event_types() == ["paid", "sent"]
    assert both.versions("paid") == [1, 2]
    first = both.find("paid", 1)
    assert first is not None
    assert first.document == {"required": ["a"]}


@dataclass
class Endless:
    again: list[Endless]


def test_a_type_that_contains_itself_needs_a_document() -> None:
    with pytest.raises(UsageError, match="contains itself"):
        json_schema_of(Endless)


SEMANTIC = st.tuples(*[st.integers(0, 99)] * 3).map(lambda parts: ".".join(map(str, parts)))


@given(st.lists(SEMANTIC | st.integers(1, 200)))
def test_versions_have_one_order_and_survive_as_text(versions: list[Version]) -> None:
    ordered = sorted(versions, key=version_order)
    assert [parse_version(str(version)) for version in ordered] == ordered
    keys = [version_order(version)[:3] for version in ordered]
    assert keys == sorted(keys)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.2", "v1", "01", "1.2.3.4", None, True, 1.5])
def test_a_text_that_is_no_version_is_none(text: Any) -> None:
    assert parse_version(text) is None
