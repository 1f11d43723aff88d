"""The setting OUTRIDER, a dict whose keys are all optional; this module alone reads it.

DATABASE is the alias of the database that holds the outbox, SCHEMA the schema in PostgreSQL, BROKER the URL that
`manage.py outrider` uses, LANES the number of lanes at the first migration, and WAKE whether relays are woken after a
commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

from django.conf import settings
from django.core.signals import setting_changed
from django.db import connections

from outrider.config import nearest
from outrider.errors import BadSetting
from outrider.staging import Outbox

NAME = "OUTRIDER"
LANES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """What OUTRIDER says, with its defaults."""

    database: str = "default"
    schema: str = "outrider"
    broker: str | None = None
    lanes: int = 32
    wake: bool = True


class Problem(NamedTuple):
    """What is wrong with OUTRIDER, and what to do."""

    text: str
    remedy: str


_KINDS: Mapping[str, type] = {"DATABASE": str, "SCHEMA": str, "BROKER": str, "LANES": int, "WAKE": bool}
assert _KINDS.keys() == {field.name.upper() for field in fields(Settings)}


@cache
def current() -> Settings:
    """Return the settings in force; raise what the system check would report.

    ```python
    alias = current().database
    ```
    """
    given = getattr(settings, NAME, {})
    if found := problems(given):
        raise BadSetting(f"{found[0].text}; {found[0].remedy}")
    return Settings(**{key.lower(): value for key, value in given.items()})


def while_loading() -> Settings:
    """Return the settings for what is loaded before anything is checked: what is wrong with them, the check tells.

    ```python
    alias = while_loading().database
    ```
    """
    return Settings() if problems(getattr(settings, NAME, {})) else current()


def problems(given: Any) -> list[Problem]:
    """Return what is wrong with OUTRIDER, key by key.

    ```python
    problems({"DATABSE": "default"})  # OUTRIDER has no key DATABSE; did you mean DATABASE?
    ```
    """
    if not isinstance(given, Mapping):
        return [Problem(f"{NAME} is not a dict", f'write {NAME} = {{"DATABASE": "default"}}')]
    return [problem for key, value in given.items() if (problem := _problem(key, value))]


def _problem(key: Any, value: Any) -> Problem | None:
    if key not in _KINDS:
        near = nearest(str(key).upper(), _KINDS)
        return Problem(f"{NAME} has no key {key!r}", f"did you mean {near}?" if near else f"valid: {', '.join(_KINDS)}")
    kind = _KINDS[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return Problem(f"{NAME}[{key!r}] is no {kind.__name__}", f"write a value such as {_EXAMPLES[key]!r}")
    return _unfit(key, value)


_EXAMPLES = {"DATABASE": "default", "SCHEMA": "outrider", "BROKER": "kafka://localhost:9092", "LANES": 32, "WAKE": True}


def _unfit(key: str, value: Any) -> Problem | None:
    if key == "DATABASE" and value not in connections:
        return Problem(f"{NAME}['DATABASE'] = {value!r} is not in DATABASES", f"use one of: {', '.join(connections)}")
    if key == "LANES" and not 1 <= value <= LANES_MAX:
        return Problem(f"{NAME}['LANES'] = {value} cannot work", f"use 1 to {LANES_MAX}, 32 suits most")
    if key == "SCHEMA":
        try:
            Outbox(schema=value)
        except BadSetting as error:
            text, _, remedy = str(error).partition("; ")
            return Problem(f"{NAME}['SCHEMA']: {text}", remedy)
    return None


def table(name: str) -> str:
    """Return the name of a table as Django writes it: with its schema in PostgreSQL, bare in SQLite.

    ```python
    table("outbox")  # '"outrider"."outbox"'
    ```
    """
    chosen = while_loading()
    # Django leaves a name alone that begins and ends with a quotation mark.
    return f'"{chosen.schema}"."{name}"' if connections[chosen.database].vendor == "postgresql" else name


def _forget(*, setting: str, **_: Any) -> None:
    if setting in (NAME, "DATABASES"):
        current.cache_clear()


setting_changed.connect(_forget)
