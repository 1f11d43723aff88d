"""The settings and their kinds: how a value is read from text, and written for a child process.

Files and variables hold text, so a kind reads both in the same way. In errors, `label` names the setting and its
origin; the value is shown as written, without the contents of variables.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from outrider.errors import InvalidSetting
from outrider.event import OnDeadLetter
from outrider.outbox.model import Retention
from outrider.outbox.settings import RelaySettings
from outrider.redaction import ErrorText
from outrider.retry import RetryPolicy

NUMBER_MAX = 1_000_000

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

PREFIX = "OUTRIDER_"

FILE_VARIABLE = f"{PREFIX}CONFIG"

LEVELS = ("debug", "info", "warning", "error")

PROCESSES_MAX = 64

_KINDS: dict[str, type[int] | type[float]] = {"int": int, "float": float, "float | None": float}


@dataclass(frozen=True, slots=True)
class GivenValue:
    """The value of a setting: as written, with its references filled in, and its origin."""

    written: Any
    value: Any
    origin: str
    label: str

    def reject(self, problem: str, remedy: str) -> InvalidSetting:
        """Return the error for this value."""
        shown = f" = {self.written!r}" if isinstance(self.written, str | int | float) else ""
        return InvalidSetting(f"{self.label}{shown} {problem}; {remedy}")


class SettingKind(Protocol):
    """A kind of setting: reads a given value, and writes the value for a child process."""

    @property
    def structured(self) -> bool:
        """Whether a variable holds the value as YAML, as a list or a mapping."""
        ...

    def read(self, given: GivenValue) -> Any:
        """Return the value, or raise InvalidSetting."""
        ...

    def write(self, value: Any) -> str:
        """Return the value as text that `read` understands."""
        ...


@dataclass(frozen=True, slots=True)
class TextSetting:
    """Any text."""

    structured = False

    def read(self, given: GivenValue) -> str:
        return _scalar(given, "a text").strip()

    def write(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class NumberSetting:
    """A number above 0, or from 0 on, up to a maximum.

    >>> NumberSetting(int).read(GivenValue("7", "7", "", "batch_max"))
    7
    """

    kind: type[int] | type[float]
    most: float = NUMBER_MAX
    zero: bool = False
    structured = False

    def read(self, given: GivenValue) -> int | float:
        text = _scalar(given, "a number")
        try:
            number = self.kind(text)
        except (ValueError, OverflowError):
            wanted = "a whole number" if self.kind is int else "a number"
            raise given.reject(f"is not {wanted}", "give one above 0") from None
        if not (math.isfinite(number) and (number > 0 or (self.zero and number == 0)) and number <= self.most):
            least = "from 0" if self.zero else "above 0 and"
            raise given.reject("cannot work", f"give a number {least} up to {self.most:g}")
        return number

    def write(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class FlagSetting:
    """A boolean: true or false."""

    structured = False

    def read(self, given: GivenValue) -> bool:
        text = _scalar(given, "true or false").lower()
        if text not in _YES + _NO:
            raise given.reject("is neither true nor false", "write one of the two")
        return text in _YES

    def write(self, value: Any) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class ChoiceSetting:
    """A word of a fixed list, as text or as a member of an enumeration.

    >>> ChoiceSetting(tuple(OnDeadLetter), OnDeadLetter).read(GivenValue("SKIP", "SKIP", "", "policy"))
    <OnDeadLetter.SKIP: 'skip'>
    """

    words: tuple[str, ...]
    kind: type[str] = str
    structured = False

    def read(self, given: GivenValue) -> str:
        text = _scalar(given, "a word").lower()
        if text not in self.words:
            suggestion = f"did you mean {close}? " if (close := nearest(text, self.words)) else ""
            raise given.reject("is not known", f"{suggestion}(valid: {', '.join(self.words)})")
        return self.kind(text)

    def write(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class NamesSetting:
    """A list of names."""

    structured = True

    def read(self, given: GivenValue) -> tuple[str, ...]:
        if given.value == "":
            return ()
        if not isinstance(given.value, list) or not all(isinstance(name, str) and name for name in given.value):
            raise given.reject("is not a list of names", "write one such as [orders, payments]")
        return tuple(dict.fromkeys(given.value))

    def write(self, value: Any) -> str:
        return json.dumps(list(value), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class PoliciesSetting:
    """Dead letter policies by topic pattern; the first matching pattern counts."""

    structured = True

    def read(self, given: GivenValue) -> dict[str, str]:
        if given.value == "":
            return {}
        if not isinstance(given.value, dict):
            raise given.reject("is not a mapping of topics", 'write one such as {"audit.*": skip}')
        choice = ChoiceSetting(tuple(OnDeadLetter), OnDeadLetter)
        return {
            pattern: choice.read(GivenValue(given.written[pattern], value, given.origin, f"{given.label}.{pattern}"))
            for pattern, value in given.value.items()
        }

    def write(self, value: Any) -> str:
        return json.dumps(dict(value), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class UrlSetting:
    """A URL, or a mapping with the key `url` and the options of its query as other keys.

    >>> said = {"url": "amqp://mq/shop", "exchange": "shop", "declare": ["billing:events.order.*", "audit"]}
    >>> UrlSetting().read(GivenValue(said, said, "", "broker"))
    'amqp://mq/shop?exchange=shop&declare=billing:events.order.*,audit'
    """

    structured = False

    def read(self, given: GivenValue) -> str:
        if not isinstance(given.value, Mapping):
            return _scalar(given, "a URL, or a mapping with one").strip()
        options = dict(given.value)
        url = options.pop("url", "")
        if not url or not isinstance(url, str):
            raise given.reject("names no URL", "add the key url")
        for name, value in options.items():
            if not _is_plain(value):
                raise given.reject(f"has a {name} that is neither a text nor a list of them", "write it as one text")
        said = {name: value if isinstance(value, str) else ",".join(value) for name, value in options.items()}
        query = urlencode(said, quote_via=quote, safe="/:,*")
        return url + ("&" if "?" in url else "?") + query if query else url

    def write(self, value: Any) -> str:
        return str(value)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is most similar to the given name, or None.

    >>> nearest("lease_second", ["lease_seconds", "workers"])
    'lease_seconds'
    """
    return next(iter(difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)), None)


def _scalar(given: GivenValue, wanted: str) -> str:
    if isinstance(given.value, list | Mapping):
        raise given.reject("is a list or a mapping", f"give {wanted}")
    return str(given.value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value))


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: its path in the file, and its kind.

    >>> Setting("relay.retry.factor", NumberSetting(float)).variable
    'OUTRIDER_RETRY_FACTOR'
    """

    path: str
    kind: SettingKind

    @property
    def name(self) -> str:
        """Return the name of the option of `load`."""
        return self.path.removeprefix("relay.").replace(".", "_")

    @property
    def option(self) -> str:
        """Return the name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Return the name in the environment."""
        return f"{PREFIX}{self.name.upper()}"


def _numbers(
    of: type[RelaySettings] | type[RetryPolicy] | type[Retention],
) -> dict[str, type[int] | type[float]]:
    return {field.name: _KINDS[str(field.type)] for field in fields(of) if str(field.type) in _KINDS}


def _table() -> dict[str, SettingKind]:
    table: dict[str, SettingKind] = {
        "store": UrlSetting(),
        "broker": UrlSetting(),
        "schema": TextSetting(),
        "archive": FlagSetting(),
        "processes": NumberSetting(int, most=PROCESSES_MAX),
        "log_level": ChoiceSetting(LEVELS),
        "topics": NamesSetting(),
        "dead_letters.policy": ChoiceSetting(tuple(OnDeadLetter), OnDeadLetter),
        "dead_letters.topics": PoliciesSetting(),
        "relay.topic_rule": TextSetting(),
        "payloads": TextSetting(),
        "error_text": ChoiceSetting(tuple(ErrorText), ErrorText),
    }
    table |= {f"relay.{name}": NumberSetting(kind) for name, kind in RELAY_NUMBERS.items()}
    table |= {f"relay.retry.{name}": NumberSetting(kind, zero=name == "jitter") for name, kind in RETRY_NUMBERS.items()}
    table |= {f"relay.retention.{name}": NumberSetting(kind) for name, kind in RETENTION_NUMBERS.items()}
    return table


RELAY_NUMBERS = _numbers(RelaySettings)
"""The numbers of the relay; every number is an option and a variable."""


RETRY_NUMBERS = _numbers(RetryPolicy)


RETENTION_NUMBERS = _numbers(Retention)


SETTINGS: dict[str, Setting] = {path: Setting(path, kind) for path, kind in _table().items()}
"""Every setting by its path in the file."""


SECTIONS = frozenset(path[:end] for path in SETTINGS for end, character in enumerate(path) if character == ".")
"""The paths of sections."""


BY_NAME = {setting.name: setting for setting in SETTINGS.values()}


VARIABLES = (*(setting.variable for setting in SETTINGS.values()), FILE_VARIABLE)
