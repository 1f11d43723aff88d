"""Declarative checks for classes of settings: the range of each number, checked when the settings are created."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from outrider.errors import InvalidSetting


class Range(NamedTuple):
    """The valid values of a numeric setting.

    >>> str(Range(1, 64, whole=True)), str(Range(above=0)), str(Range(0, below=1))
    ('a whole number from 1 to 64', 'a number above 0', 'a number from 0 to below 1')
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    whole: bool = False
    optional: bool = False

    def contains(self, value: float) -> bool:
        """Return whether a number lies in the range."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"from": self.least, "above": self.above, "to": self.most, "to below": self.below}
        said = [f"{word} {bound:,.15g}" for word, bound in bounds.items() if bound is not None]
        return " ".join(["a whole number" if self.whole else "a number", *said])


def check_ranges(settings: object, ranges: Mapping[str, Range], *, prefix: str = "") -> None:
    """Raise InvalidSetting for the first setting with a wrong type or a value outside its range."""
    for name, allowed in ranges.items():
        value: Any = getattr(settings, name)
        if value is None and allowed.optional:
            continue
        kinds = (int,) if allowed.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not allowed.contains(value):
            raise InvalidSetting(f"{prefix}{name} = {value!r} cannot work; use {allowed}")


def check_words(settings: object, words: Mapping[str, type[StrEnum]]) -> None:
    """Replace words by members of their enumerations. Raises InvalidSetting for a word that is not known."""
    for name, kind in words.items():
        word: Any = getattr(settings, name)
        try:
            object.__setattr__(settings, name, kind(word))
        except ValueError:
            raise InvalidSetting(f"{name} = {word!r} is not known (valid: {', '.join(kind)})") from None
