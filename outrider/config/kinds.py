"""The kinds of settings: how each is read from what was written, and written for a child process.

A file and a variable say everything as text, so one reading serves both. `label` names the place in errors; what was
written is shown there as it was written, with references to variables not filled in.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from outrider.errors import BadSetting
from outrider.outcome import Policy

NUMBER_MAX = 1_000_000
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody gave it: as written, with its references filled in, and where."""

    written: Any
    value: Any
    origin: str
    label: str

    def refuse(self, problem: str, remedy: str) -> BadSetting:
        """Return the error that names this place."""
        shown = f" = {self.written!r}" if isinstance(self.written, str | int | float) else ""
        return BadSetting(f"{self.label}{shown} {problem}; {remedy}")


class Kind(Protocol):
    """How one sort of setting is read and written."""

    @property
    def structured(self) -> bool:
        """Whether a variable says it in YAML, as a list or a mapping."""
        ...

    def read(self, given: Given) -> Any:
        """Return the value, or raise BadSetting."""
        ...

    def write(self, value: Any) -> str:
        """Return what `read` understands."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """Any text."""

    structured = False

    def read(self, given: Given) -> str:
        return _scalar(given, "a text").strip()

    def write(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A number above 0, or from 0 on, and not beyond reason.

    >>> Number(int).read(Given("7", "7", "", "batch_max"))
    7
    """

    kind: type[int] | type[float]
    most: float = NUMBER_MAX
    zero: bool = False
    structured = False

    def read(self, given: Given) -> int | float:
        text = _scalar(given, "a number")
        try:
            number = self.kind(text)
        except (ValueError, OverflowError):
            wanted = "a whole number" if self.kind is int else "a number"
            raise given.refuse(f"is not {wanted}", "give one above 0") from None
        if not (math.isfinite(number) and (number > 0 or (self.zero and number == 0)) and number <= self.most):
            least = "from 0" if self.zero else "above 0 and"
            raise given.refuse("cannot work", f"give a number {least} up to {self.most:g}")
        return number

    def write(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """Yes or no."""

    structured = False

    def read(self, given: Given) -> bool:
        text = _scalar(given, "true or false").lower()
        if text not in _YES + _NO:
            raise given.refuse("is neither true nor false", "write one of the two")
        return text in _YES

    def write(self, value: Any) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words, as a text or as a member of an enumeration.

    >>> Choice(tuple(Policy), Policy).read(Given("SKIP", "SKIP", "", "policy"))
    <Policy.SKIP: 'skip'>
    """

    words: tuple[str, ...]
    kind: type[str] = str
    structured = False

    def read(self, given: Given) -> str:
        text = _scalar(given, "a word").lower()
        if text not in self.words:
            hint = f"did you mean {near}? " if (near := nearest(text, self.words)) else ""
            raise given.refuse("is not known", f"{hint}(valid: {', '.join(self.words)})")
        return self.kind(text)

    def write(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Names:
    """A list of names."""

    structured = True

    def read(self, given: Given) -> tuple[str, ...]:
        if given.value == "":
            return ()
        if not isinstance(given.value, list) or not all(isinstance(name, str) and name for name in given.value):
            raise given.refuse("is not a list of names", "write one such as [orders, payments]")
        return tuple(dict.fromkeys(given.value))

    def write(self, value: Any) -> str:
        return json.dumps(list(value), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Policies:
    """Patterns of topics, and what their streams do about a dead letter; the first that matches counts."""

    structured = True

    def read(self, given: Given) -> dict[str, str]:
        if given.value == "":
            return {}
        if not isinstance(given.value, dict):
            raise given.refuse("is not a mapping of topics", 'write one such as {"audit.*": skip}')
        choice = Choice(tuple(Policy), Policy)
        return {
            pattern: choice.read(Given(given.written[pattern], value, given.origin, f"{given.label}.{pattern}"))
            for pattern, value in given.value.items()
        }

    def write(self, value: Any) -> str:
        return json.dumps(dict(value), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Url:
    """A URL; or a mapping with the URL and, as keys, what its query can say.

    >>> said = {"url": "amqp://mq/shop", "exchange": "shop", "declare": ["billing:events.order.*", "audit"]}
    >>> Url().read(Given(said, said, "", "broker"))
    'amqp://mq/shop?exchange=shop&declare=billing:events.order.*,audit'
    """

    structured = False

    def read(self, given: Given) -> str:
        if not isinstance(given.value, Mapping):
            return _scalar(given, "a URL, or a mapping with one").strip()
        options = dict(given.value)
        url = options.pop("url", "")
        if not url or not isinstance(url, str):
            raise given.refuse("names no place", "add the key url")
        for name, value in options.items():
            if not _is_plain(value):
                raise given.refuse(f"has a {name} that is neither a text nor a list of them", "write it as one text")
        said = {name: value if isinstance(value, str) else ",".join(value) for name, value in options.items()}
        query = urlencode(said, quote_via=quote, safe="/:,*")
        return url + ("&" if "?" in url else "?") + query if query else url

    def write(self, value: Any) -> str:
        return str(value)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that looks most like the given one, if any does.

    >>> nearest("lease_second", ["lease_seconds", "workers"])
    'lease_seconds'
    """
    return next(iter(difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)), None)


def _scalar(given: Given, wanted: str) -> str:
    if isinstance(given.value, list | Mapping):
        raise given.refuse("is a list or a mapping", f"give {wanted}")
    return str(given.value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value))
