"""Loads the settings: defaults, then the file, then the environment, then options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.config import yaml_file
from outrider.config.schema import (
    BY_NAME,
    FILE_VARIABLE,
    PREFIX,
    RELAY_NUMBERS,
    RETENTION_NUMBERS,
    RETRY_NUMBERS,
    SECTIONS,
    SETTINGS,
    VARIABLES,
    GivenValue,
    Setting,
    UrlSetting,
    nearest,
)
from outrider.config.yaml_file import Spot, filled, read_file
from outrider.errors import InvalidSetting
from outrider.outbox.model import Retention
from outrider.outbox.settings import RelaySettings
from outrider.redaction import has_secret
from outrider.retry import RetryPolicy

_FOREIGN = (f"{PREFIX}TEST_", f"{PREFIX}REQUIRE_", f"{PREFIX}DEBUG", f"{PREFIX}ACTOR", f"{PREFIX}AUDIT_KEY")

_RELAY_SETTINGS = {
    "dead_letters.policy": "on_dead_letter",
    "dead_letters.topics": "dead_letter_policies",
    "error_text": "error_text",
}


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a process: URLs of store and broker, and the numbers of the relay.

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
    topic_rule: str = ""
    """The function that names the topic of rows without one, as `module:function`; empty means the default rule."""
    payloads: str = ""
    """The `Payloads` of the application, as `module:object`; empty means that payloads are not checked."""
    relay: RelaySettings = field(default_factory=RelaySettings)
    """The settings of the relay; `error_text` counts for consumers and saga workers as well."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The origin of every setting that is not a default, by the path of the setting."""

    def store_url(self) -> str:
        """Return the URL of the store; a missing one is an InvalidSetting."""
        return _required(self.store, "store", "sqlite:///outbox.db")

    def broker_url(self) -> str:
        """Return the URL of the broker; a missing one is an InvalidSetting."""
        return _required(self.broker, "broker", "embedded:///log.db")


def read_settings_file(path: str, environ: Mapping[str, str]) -> dict[str, GivenValue]:
    """Return the values of a settings file by the paths of the settings."""
    return {where: _read_given(path, where, spot, environ) for where, spot in _settings(path, "", read_file(path))}


def load(options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Load the settings. An option of None counts as absent; the option `config` names the file.

    >>> load({"lease_seconds": 20.0}, {"OUTRIDER_LEASE_SECONDS": "30", "OUTRIDER_WORKERS": "2"}).relay.lease_seconds
    20.0
    """
    env = os.environ if environ is None else environ
    check_names(env)
    chosen = {name: value for name, value in (options or {}).items() if value is not None}
    path = str(chosen.pop("config", None) or env.get(FILE_VARIABLE, "").strip())
    given = {**(read_settings_file(path, env) if path else {}), **_from_environment(env), **_from_options(chosen)}
    read = {path: SETTINGS[path].kind.read(value) for path, value in given.items()}
    return _config(read, {path: value.origin for path, value in given.items()})


def check_names(names: Iterable[str]) -> None:
    """Reject OUTRIDER_ variables that are no settings.

    >>> check_names(["OUTRIDER_STORE", "HOME"])
    """
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(_FOREIGN):
            # Compared without the common prefix, which would make all names look alike.
            close = nearest(name.removeprefix(PREFIX), [valid.removeprefix(PREFIX) for valid in VARIABLES])
            remedy = f"did you mean {PREFIX}{close}?" if close else f"valid: {', '.join(VARIABLES)}"
            raise InvalidSetting(f"the variable {name} is not a setting of outrider; {remedy}")


def values(config: Config) -> dict[str, Any]:
    """Return every setting by its path; an absent value is None.

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
        **{path: getattr(relay, name) for path, name in _RELAY_SETTINGS.items()},
        "relay.topic_rule": config.topic_rule,
        "payloads": config.payloads,
    }


def variables(config: Config) -> dict[str, str]:
    """Return all settings as variables for a child process; a command line is public, an environment is not.

    The child reads no file, so a later change of the file does not reach it.

    >>> variables(load({"batch_max": 7}, {}))["OUTRIDER_BATCH_MAX"]
    '7'
    """
    known = {path: value for path, value in values(config).items() if value is not None}
    return {
        FILE_VARIABLE: "",
        **{SETTINGS[path].variable: SETTINGS[path].kind.write(value) for path, value in known.items()},
    }


def _from_environment(env: Mapping[str, str]) -> dict[str, GivenValue]:
    found = {}
    for path, setting in SETTINGS.items():
        text = env.get(setting.variable)
        # An empty URL or name counts as absent.
        if text is None or (path in ("store", "broker", "schema") and not text.strip()):
            continue
        value = yaml_file.parse(text, setting.variable).plain() if setting.kind.structured else text
        found[path] = GivenValue(value, value, setting.variable, setting.variable)
    return found


def _from_options(chosen: Mapping[str, Any]) -> dict[str, GivenValue]:
    for name in chosen:
        if name not in BY_NAME:
            remedy = f"did you mean {close}?" if (close := nearest(name, BY_NAME)) else f"valid: {', '.join(BY_NAME)}"
            raise InvalidSetting(f"{name} is not a setting of outrider; {remedy}")
    return {BY_NAME[name].path: _option(BY_NAME[name], value) for name, value in chosen.items()}


def _option(setting: Setting, value: Any) -> GivenValue:
    return GivenValue(value, value, setting.option, setting.option)


def _config(read: dict[str, Any], origins: dict[str, str]) -> Config:
    # The rule is the store's, although people look for it among the settings of the relay.
    topic_rule = read.pop("relay.topic_rule", "")
    try:
        relay = RelaySettings(
            **_under("relay.", read),
            **{name: read[path] for path, name in _RELAY_SETTINGS.items() if path in read},
            retry=RetryPolicy(**_under("relay.retry.", read)),
            retention=Retention(**_under("relay.retention.", read)),
        )
    except InvalidSetting as error:
        raise InvalidSetting(f"{error}{_origins_of(str(error), origins)}") from None
    own = {path: read[path] for path in ("archive", "processes", "log_level", "topics", "payloads") if path in read}
    store, broker, schema = (read.get(path) or None for path in ("store", "broker", "schema"))
    return Config(store, broker, schema or "outrider", **own, topic_rule=topic_rule, relay=relay, origins=origins)


def _under(section: str, read: Mapping[str, Any]) -> dict[str, Any]:
    inside = {path.removeprefix(section): value for path, value in read.items() if path.startswith(section)}
    return {name: value for name, value in inside.items() if "." not in name}


def _origins_of(text: str, origins: Mapping[str, str]) -> str:
    named = [path for path in origins if re.search(rf"\b{path.rpartition('.')[2]}\b", text)]
    return f" ({'; '.join(f'{path} is from {origins[path]}' for path in named)})" if named else ""


def _required(value: str | None, name: str, example: str) -> str:
    if value is None:
        raise InvalidSetting(
            f"no {name} given; pass --{name} URL or set {PREFIX}{name.upper()}, or {name} in the file that --config "
            f"names, such as {example}"
        )
    return value


def _settings(source: str, section: str, spot: Spot) -> Iterator[tuple[str, Spot]]:
    if spot.value == "":
        return
    if not isinstance(spot.value, dict):
        raise InvalidSetting(
            f"{source}, line {spot.line}: {section or 'the file'} is not a mapping; write `name: value` lines"
        )
    for name, child in spot.value.items():
        path = f"{section}.{name}" if section else name
        if path in SETTINGS:
            yield path, child
        elif path in SECTIONS:
            yield from _settings(source, path, child)
        else:
            raise InvalidSetting(
                f"{source}, line {child.line}: {path} is not a setting of outrider; {_remedy(section, name)}"
            )


def _remedy(section: str, name: str) -> str:
    elsewhere = [path for path in SETTINGS if path.rpartition(".")[2] == name]
    start = f"{section}." if section else ""
    next_to_url = sorted({path[len(start) :].partition(".")[0] for path in SETTINGS if path.startswith(start)})
    if close := nearest(name, next_to_url):
        return f"did you mean {start}{close}?"
    if len(elsewhere) == 1:
        return f"did you mean {elsewhere[0]}?"
    if close := nearest(name, SETTINGS):
        return f"did you mean {close}?"
    return f"valid here: {', '.join(next_to_url)}"


def _read_given(source: str, path: str, spot: Spot, environ: Mapping[str, str]) -> GivenValue:
    origin = f"{source}, line {spot.line}"
    label = f"{origin}: {path}"
    written = spot.plain()
    for name, text in _texts(written, "") if isinstance(SETTINGS[path].kind, UrlSetting) else ():
        if has_secret(text, name):
            raise InvalidSetting(
                f"{label} holds a password; keep it in the environment, and write ${{NAME}} instead "
                "(NAME is the variable)"
            )
    return GivenValue(written, filled(written, environ, label), origin, label)


def _texts(written: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(written, dict):
        for key, value in written.items():
            yield from _texts(value, key)
    elif isinstance(written, list):
        for value in written:
            yield from _texts(value, name)
    else:
        yield name, written
