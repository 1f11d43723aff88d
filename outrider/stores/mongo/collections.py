"""What a collection is made of, and the migrations that make them.

A step of a migration is one database command. Each can be repeated: a collection or an index that is there already is
left as it is. So a run that broke off between a command and its record does the command again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bson import json_util

from outrider.stores.migrations import Step

SEED = "seed"
"""A step that is not a command of the server: fill a collection with what was fixed at install."""


@dataclass(frozen=True, slots=True)
class Index:
    """An index: its keys in order, and the documents it holds (None: all)."""

    name: str
    keys: tuple[str, ...]
    only: Mapping[str, Any] | None = None
    unique: bool = False

    def command(self, collection: str) -> dict[str, Any]:
        """Return the command that makes it.

        >>> Index("outbox_archive_sent", ("sent_at",)).command("outbox_archive")["createIndexes"]
        'outbox_archive'
        """
        index: dict[str, Any] = {"key": dict.fromkeys(self.keys, 1), "name": self.name}
        if self.only is not None:
            index["partialFilterExpression"] = dict(self.only)
        if self.unique:
            index["unique"] = True
        return {"createIndexes": collection, "indexes": [index]}


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection, its indexes, and which documents it takes (None: any)."""

    name: str
    indexes: tuple[Index, ...] = ()
    validator: Mapping[str, Any] | None = None
    seeded: bool = False

    def steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the commands that make it, by name."""
        rules = {} if self.validator is None else {"validator": dict(self.validator)}
        yield self.name, {"create": self.name, **rules}
        for index in self.indexes:
            yield index.name, index.command(self.name)
        if self.seeded:
            yield f"{self.name}_documents", {SEED: self.name}


def steps(version: int, migration: str, collections: Iterable[Collection]) -> list[Step]:
    """Return the steps of a migration that makes these collections.

    >>> [step.name for step in steps(1, "0001_outbox", [Collection("outbox_lane", seeded=True)])]
    ['outbox_lane', 'outbox_lane_documents']
    """
    return [_step(version, migration, *named) for collection in collections for named in collection.steps()]


def _step(version: int, migration: str, name: str, command: dict[str, Any]) -> Step:
    text = json_util.dumps(command, json_options=json_util.RELAXED_JSON_OPTIONS, ensure_ascii=False)
    return Step(version, migration, name, text, hashlib.sha256(text.encode()).hexdigest()[:16])


def command_of(step: Step) -> dict[str, Any]:
    """Return the command that a step's text describes.

    >>> command_of(steps(1, "0001_outbox", [Collection("outbox_lane")])[0])
    {'create': 'outbox_lane'}
    """
    command: dict[str, Any] = json_util.loads(step.sql)
    return command


def texts(*names: str, longest: int = 1000) -> dict[str, Any]:
    """Return the rule for fields that may hold a text, or nothing.

    >>> texts("topic")
    {'topic': {'bsonType': ['string', 'null'], 'maxLength': 1000}}
    """
    return {name: {"bsonType": ["string", "null"], "maxLength": longest} for name in names}


def optional(kinds: str | list[str], *names: str) -> dict[str, Any]:
    """Return the rule for fields of one kind, or nothing.

    >>> optional("date", "sent_at")
    {'sent_at': {'bsonType': ['date', 'null']}}
    """
    listed = [kinds] if isinstance(kinds, str) else kinds
    return {name: {"bsonType": [*listed, "null"]} for name in names}
