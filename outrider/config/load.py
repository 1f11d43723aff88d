"""Putting the layers together: defaults, then the file, then the environment, then options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.backoff import RetryPolicy
from outrider.config import document, file
from outrider.config.kinds import Given, nearest
from outrider.config.names import (
    BY_NAME,
    FILE_VARIABLE,
    PREFIX,
    RELAY_NUMBERS,
    RETENTION_NUMBERS,
    RETRY_NUMBERS,
    SETTINGS,
    VARIABLES,
    Setting,
)
from outrider.errors import BadSetting
from outrider.outbox.settings import RelaySettings
from outrider.store import Retention

_FOREIGN = (f"{PREFIX}TEST_", f"{PREFIX}REQUIRE_", f"{PREFIX}DEBUG")
_OF_THE_RELAY = {"dead_letters.policy": "dead_letter_policy", "dead_letters.topics": "dead_letter_policies"}


@dataclass(frozen=True, slots=True)
class Config:
    """Where things are and how the relay runs.

    >>> load({}, {"OUTRIDER_SCHEMA": "shop"}).schema
    'shop'
    """

    store: str | None = field(default=None, repr=False)
    broker: str | None = field(default=None, repr=False)
    schema: str = "outrider"
    archive: bool = True
    processes: int = 1
    log_level: str = "info"
    topics: tuple[str, ...] = ()
    relay: RelaySettings = field(default_factory=RelaySettings)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each setting that is not a default comes from, by its path."""

    def store_url(self) -> str:
        """Return the store's URL, or say how to give one."""
        return _required(self.store, "store", "sqlite:///outbox.db")

    def broker_url(self) -> str:
        """Return the broker's URL, or say how to give one."""
        return _required(self.broker, "broker", "embedded:///log.db")


def load(options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings. An option that is None was not given; the option `config` names the file.

    >>> load({"lease_seconds": 20.0}, {"OUTRIDER_LEASE_SECONDS": "30", "OUTRIDER_WORKERS": "2"}).relay.lease_seconds
    20.0
    """
    env = os.environ if environ is None else environ
    check_names(env)
    chosen = {name: value for name, value in (options or {}).items() if value is not None}
    path = str(chosen.pop("config", None) or env.get(FILE_VARIABLE, "").strip())
    given = {**(file.read(path, env) if path else {}), **_from_environment(env), **_from_options(chosen)}
    read = {path: SETTINGS[path].kind.read(value) for path, value in given.items()}
    return _config(read, {path: value.origin for path, value in given.items()})


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


def values(config: Config) -> dict[str, Any]:
    """Return every setting in force by its path; one that is not set is None.

    >>> values(Config())["relay.lease_seconds"]
    15.0
    """
    relay = config.relay
    own = ("store", "broker", "schema", "archive", "processes", "log_level", "topics")
    return {
        **{name: getattr(config, name) for name in own},
        **{f"relay.{name}": getattr(relay, name) for name in RELAY_NUMBERS},
        **{f"relay.retry.{name}": getattr(relay.retry, name) for name in RETRY_NUMBERS},
        **{f"relay.retention.{name}": getattr(relay.retention, name) for name in RETENTION_NUMBERS},
        **{path: getattr(relay, name) for path, name in _OF_THE_RELAY.items()},
    }


def variables(config: Config) -> dict[str, str]:
    """Write all settings as variables, for a child process: its command line is public, its environment is not.

    The child reads no file, so it runs with exactly these even if the file changes meanwhile.

    >>> variables(load({"batch_max": 7}, {}))["OUTRIDER_BATCH_MAX"]
    '7'
    """
    known = {path: value for path, value in values(config).items() if value is not None}
    return {
        FILE_VARIABLE: "",
        **{SETTINGS[path].variable: SETTINGS[path].kind.write(value) for path, value in known.items()},
    }


def _from_environment(env: Mapping[str, str]) -> dict[str, Given]:
    found = {}
    for path, setting in SETTINGS.items():
        text = env.get(setting.variable)
        # A place or a name that is empty is one that is not given.
        if text is None or (path in ("store", "broker", "schema") and not text.strip()):
            continue
        value = document.parse(text, setting.variable).plain() if setting.kind.structured else text
        found[path] = Given(value, value, setting.variable, setting.variable)
    return found


def _from_options(chosen: Mapping[str, Any]) -> dict[str, Given]:
    for name in chosen:
        if name not in BY_NAME:
            remedy = f"did you mean {near}?" if (near := nearest(name, BY_NAME)) else f"valid: {', '.join(BY_NAME)}"
            raise BadSetting(f"{name} is not a setting of outrider; {remedy}")
    return {BY_NAME[name].path: _option(BY_NAME[name], value) for name, value in chosen.items()}


def _option(setting: Setting, value: Any) -> Given:
    return Given(value, value, setting.option, setting.option)


def _config(read: dict[str, Any], origins: dict[str, str]) -> Config:
    try:
        relay = RelaySettings(
            **_under("relay.", read),
            **{name: read[path] for path, name in _OF_THE_RELAY.items() if path in read},
            retry=RetryPolicy(**_under("relay.retry.", read)),
            retention=Retention(**_under("relay.retention.", read)),
        )
    except BadSetting as error:
        raise BadSetting(f"{error}{_blame(str(error), origins)}") from None
    own = {path: read[path] for path in ("archive", "processes", "log_level", "topics") if path in read}
    store, broker, schema = (read.get(path) or None for path in ("store", "broker", "schema"))
    return Config(store, broker, schema or "outrider", **own, relay=relay, origins=origins)


def _under(section: str, read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a section by their names in it, without those of the sections below."""
    inside = {path.removeprefix(section): value for path, value in read.items() if path.startswith(section)}
    return {name: value for name, value in inside.items() if "." not in name}


def _blame(text: str, origins: Mapping[str, str]) -> str:
    """Say where the settings come from that an error names."""
    named = [path for path in origins if re.search(rf"\b{path.rpartition('.')[2]}\b", text)]
    return f" ({'; '.join(f'{path} is from {origins[path]}' for path in named)})" if named else ""


def _required(value: str | None, name: str, example: str) -> str:
    if value is None:
        raise BadSetting(
            f"no {name} given; pass --{name} URL or set {PREFIX}{name.upper()}, or {name} in the file that --config "
            f"names, such as {example}"
        )
    return value
