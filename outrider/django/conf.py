"""The setting OUTRIDER, a dict with optional keys. Only this module reads the setting.

DATABASE is the alias of the database that holds the outbox, SCHEMA the schema in PostgreSQL, BROKER the URL that
`manage.py outrider` uses, LANES the number of lanes at the first migration, WAKE whether relays are woken after a
commit, and PAYLOADS the payloads of the project as `module:object`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.signals import setting_changed
from django.db import connections

from outrider.config import nearest
from outrider.errors import InvalidSetting, UsageError
from outrider.outbox.staging import Outbox
from outrider.payload.payloads import Payloads

NAME = "OUTRIDER"

LANES_MAX = 1024

_EXAMPLES = {
    "DATABASE": "default",
    "SCHEMA": "outrider",
    "BROKER": "kafka://localhost:9092",
    "LANES": 32,
    "WAKE": True,
    "PAYLOADS": "shop.payloads:payloads",
}

FORWARDED = (
    *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation"),
    *("target_session_attrs", "service", "passfile"),
)
"""Options of libpq that asyncpg also understands; the remaining options concern Django's own connection."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of OUTRIDER, with defaults."""

    database: str = "default"
    schema: str = "outrider"
    broker: str | None = None
    lanes: int | None = None
    wake: bool = True
    payloads: str | None = None


class Problem(NamedTuple):
    """A mistake in OUTRIDER and its remedy."""

    text: str
    remedy: str


_KINDS: Mapping[str, type] = {
    "DATABASE": str,
    "SCHEMA": str,
    "BROKER": str,
    "LANES": int,
    "WAKE": bool,
    "PAYLOADS": str,
}
assert _KINDS.keys() == {field.name.upper() for field in fields(Settings)}


@cache
def current() -> Settings:
    """Return the current settings; raise the errors that the system check would report.

    ```python
    alias = current().database
    ```
    """
    given = getattr(settings, NAME, {})
    if found := problems(given):
        raise InvalidSetting(f"{found[0].text}; {found[0].remedy}")
    return Settings(**{key.lower(): value for key, value in given.items()})


def while_loading() -> Settings:
    """Return the settings for code that is loaded before the system checks.

    Mistakes are ignored here and reported later.

    ```python
    alias = while_loading().database
    ```
    """
    return Settings() if problems(getattr(settings, NAME, {})) else current()


def problems(given: Any) -> list[Problem]:
    """Return the mistakes in OUTRIDER, key by key.

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
    return _problems(key, value)


def _problems(key: str, value: Any) -> Problem | None:
    if key == "DATABASE" and value not in connections:
        return Problem(f"{NAME}['DATABASE'] = {value!r} is not in DATABASES", f"use one of: {', '.join(connections)}")
    if key == "PAYLOADS" and not all(value.partition(":")):
        return Problem(f"{NAME}['PAYLOADS'] = {value!r} names no object", _PAYLOADS)
    if key == "LANES" and not 1 <= value <= LANES_MAX:
        return Problem(f"{NAME}['LANES'] = {value} cannot work", f"use 1 to {LANES_MAX}, 32 suits most")
    if key == "SCHEMA":
        try:
            Outbox(schema=value)
        except InvalidSetting as error:
            text, _, remedy = str(error).partition("; ")
            return Problem(f"{NAME}['SCHEMA']: {text}", remedy)
    return None


@cache
def payloads_of(target: str) -> Payloads:
    """Return the payloads that `module:object` names.

    ```python
    payloads_of("shop.payloads:payloads")
    ```
    """
    module_name, _, name = target.partition(":")
    try:
        found = getattr(import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"{NAME}['PAYLOADS']: {target} cannot be imported ({error}); {_PAYLOADS}") from error
    if not isinstance(found, Payloads):
        raise InvalidSetting(f"{NAME}['PAYLOADS']: {target} is no Payloads; {_PAYLOADS}")
    return found


def payloads_problems() -> list[Problem]:
    """Return the mistake in PAYLOADS that only an import shows. The settings of the project are loaded by then.

    ```python
    payloads_problems()  # OUTRIDER['PAYLOADS']: shop.models:payloads is no Payloads
    ```
    """
    try:
        if target := current().payloads:
            payloads_of(target)
    except InvalidSetting as error:
        text, _, remedy = str(error).rpartition("; ")
        return [Problem(text, remedy)]
    return []


_PAYLOADS = f"write module:object, such as {_EXAMPLES['PAYLOADS']!r}"


def table(name: str) -> str:
    """Return the name of a table as Django writes it: with its schema in PostgreSQL, bare in SQLite.

    ```python
    table("outbox")  # '"outrider"."outbox"'
    ```
    """
    chosen = while_loading()
    # Django does not quote a name that begins and ends with a quotation mark.
    return f'"{chosen.schema}"."{name}"' if connections[chosen.database].vendor == "postgresql" else name


def _clear(*, setting: str, **_: Any) -> None:
    if setting in (NAME, "DATABASES"):
        current.cache_clear()


setting_changed.connect(_clear)


def store_url(alias: str) -> str:
    """Return the URL of a database by its alias; in a test, the URL of the test database.

    ```python
    store_url("default")  # postgresql://shop:s3cret@db/shop?sslmode=require
    ```
    """
    connection = connections[alias]
    facts = connection.settings_dict
    if connection.vendor == "postgresql":
        return _postgres(facts)
    if connection.vendor == "sqlite":
        return _sqlite(alias, facts["NAME"])
    raise UsageError(f"DATABASES[{alias!r}] is {connection.vendor}; outrider works in PostgreSQL and SQLite")


def _postgres(facts: Mapping[str, Any]) -> str:
    options = facts.get("OPTIONS", {})
    host, query = _host(str(facts.get("HOST") or ""), str(facts.get("PORT") or ""))
    query |= {name: str(options[name]) for name in FORWARDED if options.get(name)}
    if facts.get("DISABLE_SERVER_SIDE_CURSORS"):
        # Django's setting for a connection pooler that shares sessions.
        query["pooled"] = "true"
    tail = f"?{urlencode(query, quote_via=quote)}" if query else ""
    return f"postgresql://{_user(facts)}{host}/{quote(str(facts.get('NAME') or ''), safe='')}{tail}"


def _host(host: str, port: str) -> tuple[str, dict[str, str]]:
    """Return host and port for the part of the URL before the path, or as options if they cannot stand there."""
    if host and not set(host) & set("/,:"):
        return (f"{host}:{port}" if port else host), {}
    # None, a directory of sockets, several hosts, or an IPv6 address, which is written in brackets.
    named = [f"[{each}]" if ":" in each and not each.startswith(("/", "[")) else each for each in host.split(",")]
    given = {"host": ",".join(named), "port": port}
    return "", {name: value for name, value in given.items() if value}


def _user(facts: Mapping[str, Any]) -> str:
    user, password = (quote(str(facts.get(name) or ""), safe="") for name in ("USER", "PASSWORD"))
    if not user and not password:
        return ""
    return f"{user}:{password}@" if password else f"{user}@"


def _sqlite(alias: str, name: str | Path) -> str:
    text = str(name)
    if text == ":memory:" or text.startswith("file:"):
        raise UsageError(
            f"the database {alias!r} is in memory or named by a URI, so other processes cannot open it; name a file in "
            f"DATABASES[{alias!r}]['NAME'], and for tests in ['TEST']['NAME']"
        )
    return f"sqlite:///{text}"
