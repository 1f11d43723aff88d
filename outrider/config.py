"""Settings from options and the environment, checked before anything starts.

An option wins over its variable, a variable over the default. A variable that nobody reads is refused with the nearest
valid name, because a misspelt setting that is silently ignored is found in production. Secrets in URLs are never shown.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.errors import BadSetting
from outrider.outbox.settings import RelaySettings

PREFIX = "OUTRIDER_"
NUMBER_MAX = 1_000_000
_KINDS: dict[str, type[int] | type[float]] = {"int": int, "float": float}

RELAY_NUMBERS: dict[str, type[int] | type[float]] = {
    field.name: _KINDS[str(field.type)] for field in fields(RelaySettings) if str(field.type) in _KINDS
}
"""The relay's settings that are numbers; each is an option and a variable."""

VARIABLES = tuple(f"{PREFIX}{name.upper()}" for name in ("store", "broker", "schema", *RELAY_NUMBERS))
_FOREIGN = (f"{PREFIX}TEST_", f"{PREFIX}REQUIRE_", f"{PREFIX}DEBUG")

# Up to the last @ of the line, spaces and slashes included: in doubt it hides too much.
_USERINFO_PASSWORD = re.compile(r"(?<=://)([^\s/@:?]*)[:@/][^\n]*@")
_QUERY_PASSWORD = re.compile(r"(?<=[?&])([\w.]*(?:password|passwd|pwd|secret|token))=[^\s'\")]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Config:
    """Where things are and how the relay runs.

    >>> load({}, {"OUTRIDER_SCHEMA": "shop"}).schema
    'shop'
    """

    store: str | None = None
    broker: str | None = None
    schema: str = "outrider"
    relay: RelaySettings = field(default_factory=RelaySettings)

    def store_url(self) -> str:
        """Return the store's URL, or say how to give one."""
        return _required(self.store, "store", "sqlite:///outbox.db")

    def broker_url(self) -> str:
        """Return the broker's URL, or say how to give one."""
        return _required(self.broker, "broker", "embedded:///log.db")


def load(options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings. An option that is None was not given."""
    env = os.environ if environ is None else environ
    check_names(env)
    given = {name: value for name, value in (options or {}).items() if value is not None}
    _check_options(given)
    numbers: dict[str, Any] = {name: _number(name, kind, given, env) for name, kind in RELAY_NUMBERS.items()}
    relay = RelaySettings(**{name: value for name, value in numbers.items() if value is not None})
    return Config(
        store=_text("store", given, env),
        broker=_text("broker", given, env),
        schema=_text("schema", given, env) or "outrider",
        relay=relay,
    )


def check_names(names: Iterable[str]) -> None:
    """Refuse variables of ours that nobody reads.

    >>> check_names(["OUTRIDER_STORE", "HOME"])
    """
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(_FOREIGN):
            # Compared without the prefix that all share, or everything would look alike.
            near = nearest(name.removeprefix(PREFIX), [valid.removeprefix(PREFIX) for valid in VARIABLES])
            remedy = f"did you mean {PREFIX}{near}?" if near else f"valid: {', '.join(VARIABLES)}"
            raise BadSetting(f"the variable {name} is not a setting of outrider; {remedy}")


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that looks most like the given one, if any does.

    >>> nearest("lease_second", RELAY_NUMBERS)
    'lease_seconds'
    """
    return next(iter(difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)), None)


def redacted(text: str) -> str:
    """Hide the passwords of every URL in a text. In doubt it hides too much.

    >>> redacted("postgresql://shop:s3cr/et@db/orders")
    'postgresql://shop:***@db/orders'
    """
    return _QUERY_PASSWORD.sub(r"\1=***", _USERINFO_PASSWORD.sub(r"\1:***@", text))


def variables(config: Config) -> dict[str, str]:
    """Write settings as variables, for a child process: its command line is public, its environment is not.

    >>> variables(load({"batch_max": 7}, {}))["OUTRIDER_BATCH_MAX"]
    '7'
    """
    values = {"store": config.store, "broker": config.broker, "schema": config.schema}
    values |= {name: str(getattr(config.relay, name)) for name in RELAY_NUMBERS}
    return {f"{PREFIX}{name.upper()}": value for name, value in values.items() if value is not None}


def _check_options(given: Mapping[str, Any]) -> None:
    valid = ("store", "broker", "schema", *RELAY_NUMBERS)
    for name in given:
        if name not in valid:
            remedy = f"did you mean {near}?" if (near := nearest(name, valid)) else f"valid: {', '.join(valid)}"
            raise BadSetting(f"{name} is not a setting of outrider; {remedy}")


def _required(value: str | None, name: str, example: str) -> str:
    if value is None:
        raise BadSetting(f"no {name} given; pass --{name} URL or set {PREFIX}{name.upper()}, such as {example}")
    return value


def _text(name: str, given: Mapping[str, Any], env: Mapping[str, str]) -> str | None:
    value = given.get(name, env.get(f"{PREFIX}{name.upper()}"))
    return str(value).strip() or None if value is not None else None


def _number(
    name: str, kind: type[int] | type[float], given: Mapping[str, Any], env: Mapping[str, str]
) -> int | float | None:
    variable = f"{PREFIX}{name.upper()}"
    value = given.get(name, env.get(variable))
    if value is None:
        return None
    label = name if name in given else variable
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        wanted = "a whole number" if kind is int else "a number"
        raise BadSetting(f"{label} = {value!r} is not {wanted}; give one above 0") from None
    if not (math.isfinite(number) and 0 < number <= NUMBER_MAX):
        raise BadSetting(f"{label} = {value} cannot work; give a number above 0 and up to {NUMBER_MAX}")
    return number
