"""Schemas in memory and in a folder, and their compiled form.

The validators come from jsonschema-rs, which is imported when the first schema is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import UsageError
from outrider.payload.conversion import json_schema_of
from outrider.payload.model import PayloadSchema, SchemaSource, Version, field_path, required_version, version_order

DIALECT = "https://json-schema.org/draft/2020-12/schema"

HIDDEN = "the value"
"""The words that stand for a value of the payload in an error text, which must not repeat personal data."""


class SchemaSet:
    """Schemas given in code, by event type and version: JSON Schema documents, or the types of payloads.

    A type is a pydantic model, a dataclass or a msgspec struct.

    >>> schemas = SchemaSet({"order.placed": {1: {"type": "object", "required": ["total"]}}})
    >>> schemas.versions("order.placed")
    [1]
    """

    refresh_seconds: float | None = None

    def __init__(self, schemas: Mapping[str, Mapping[Any, Any]] | None = None) -> None:
        self._schemas: dict[tuple[str, Version], PayloadSchema] = {}
        for event_type, versions in (schemas or {}).items():
            for version, document in versions.items():
                self.add(event_type, version, document)

    def add(self, event_type: str, version: Version, document: Any) -> None:
        """Add the schema of a version: a JSON Schema document, or the type of the payload."""
        known = required_version(version, event_type)
        schema = make_schema(event_type, known, document)
        compile_schema(schema)
        if (event_type, known) in self._schemas:
            raise UsageError(f"{schema.name} is there twice; give one of the two another version")
        self._schemas[event_type, known] = schema

    def find(self, event_type: str, version: Version) -> PayloadSchema | None:
        return self._schemas.get((event_type, version))

    def versions(self, event_type: str) -> Sequence[Version]:
        return sorted((version for name, version in self._schemas if name == event_type), key=version_order)

    def event_types(self) -> Sequence[str]:
        return sorted({event_type for event_type, _ in self._schemas})


class SchemaFolder(SchemaSet):
    """Schemas in a folder: the file `order.placed/2.json` is version 2 of order.placed. Read once, at the start.

    A broken file is reported with its path::

        payloads = Payloads(schemas=SchemaFolder("schemas"))
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UsageError(f"there is no folder {self.folder} with schemas; make it, or check the path")
        for file in sorted(self.folder.glob("*/*.json")):
            self.add(file.parent.name, required_version(file.stem, str(file)), read_document(file))


class SeveralSources:
    """Several sources as one: the first source that has a schema counts."""

    def __init__(self, sources: Iterable[SchemaSource]) -> None:
        self._sources = list(sources)
        times = [each.refresh_seconds for each in self._sources if each.refresh_seconds is not None]
        self.refresh_seconds: float | None = min(times, default=None)

    def find(self, event_type: str, version: Version) -> PayloadSchema | None:
        found = (source.find(event_type, version) for source in self._sources)
        return next((schema for schema in found if schema is not None), None)

    def versions(self, event_type: str) -> Sequence[Version]:
        return sorted(
            {version for source in self._sources for version in source.versions(event_type)}, key=version_order
        )

    def event_types(self) -> Sequence[str]:
        return sorted({event_type for source in self._sources for event_type in source.event_types()})


def source_of(schemas: Any) -> SchemaSource | None:
    """Return the source that the caller means: a folder, a mapping, a source, or a list of these."""
    if schemas is None:
        return None
    if isinstance(schemas, str | Path):
        return SchemaFolder(schemas)
    if isinstance(schemas, Mapping):
        return SchemaSet(schemas)
    if isinstance(schemas, list | tuple):
        found = (source_of(each) for each in schemas)
        return SeveralSources([source for source in found if source is not None])
    if not callable(getattr(schemas, "find", None)):
        raise UsageError(
            f"schemas={schemas!r:.80} is no source; pass a folder, a mapping, or a source such as SchemaFolder"
        )
    source: SchemaSource = schemas
    return source


def read_document(file: Path) -> Any:
    """Return the JSON document of a file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror}); check the path and its rights") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON ({error}); correct the file") from error


def make_schema(event_type: str, version: Version, document: Any, uri: str | None = None) -> PayloadSchema:
    """Return the schema of a document or of a type. A document with an absolute `$id` is identified by it.

    >>> make_schema("paid", 1, {"$id": "https://shop.example/paid/1"}).uri
    'https://shop.example/paid/1'
    """
    if isinstance(document, type):
        document = json_schema_of(document)
    if not isinstance(document, Mapping | bool):
        raise UsageError(
            f"{event_type} version {version}: a schema is a JSON object or a boolean, not {document!r:.80}"
        )
    own = document.get("$id") if isinstance(document, Mapping) else None
    return PayloadSchema(event_type, version, document, own if isinstance(own, str) and ":" in own else uri)


class FieldProblem(NamedTuple):
    """A field that breaks a schema: its path below the payload, and the problem."""

    path: str
    text: str


Validate = Callable[[Any], FieldProblem | None]
"""Returns the first problem of a payload, or None."""


def accept(payload: Any) -> FieldProblem | None:
    """Validate nothing, for a type without a schema.

    >>> accept({})
    """
    return None


def compile_schema(schema: PayloadSchema) -> Validate:
    """Compile a schema; a document that is no JSON Schema 2020-12 is a usage error.

    Nothing is fetched: a reference must point into the document.

    >>> compile_schema(make_schema("paid", 1, {"required": ["total"]}))({})
    FieldProblem(path='payload.total', text='it is required')
    """
    return _compiled(schema.name, json.dumps(schema.document, sort_keys=True))


@lru_cache(maxsize=4096)
def _compiled(name: str, text: str) -> Validate:
    library = validator_library()
    document = json.loads(text)
    dialect = document.get("$schema", DIALECT) if isinstance(document, dict) else DIALECT
    if not isinstance(dialect, str) or dialect.rstrip("#") != DIALECT:
        raise UsageError(f'{name}: the dialect {dialect!r} is not JSON Schema 2020-12; use "$schema": "{DIALECT}"')
    try:
        validator = library.Draft202012Validator(document, offline=True, mask=HIDDEN)
    except ValueError as error:
        raise UsageError(
            f"{name}: no valid JSON Schema ({str(error).partition(chr(10))[0]}); correct the schema"
        ) from error
    is_valid, iter_errors = validator.is_valid, validator.iter_errors

    def validate(payload: Any) -> FieldProblem | None:
        return None if is_valid(payload) else _first_problem(next(iter_errors(payload)))

    return validate


def _first_problem(error: Any) -> FieldProblem:
    parts = list(error.instance_path)
    if error.kind.name == "required":
        return FieldProblem(field_path("payload", [*parts, str(error.kind.property)]), "it is required")
    return FieldProblem(field_path("payload", parts), str(error.message))


def validator_library() -> Any:
    """Return jsonschema-rs, or say how to install it."""
    try:
        import jsonschema_rs
    except ModuleNotFoundError as error:
        raise UsageError("schemas need jsonschema-rs; run: pip install 'outrider[payload]'") from error
    return jsonschema_rs
