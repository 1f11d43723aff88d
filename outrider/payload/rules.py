"""Rules: named predicates over payloads, by event type or by prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.errors import UsageError
from outrider.payload.model import MISSING, OnInvalid, PayloadFacts, field_of

Predicate = Callable[[PayloadFacts, Any], object]
"""Takes the facts of an event and its payload. True or None: valid. False: invalid. A text: the reason of a problem."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A named predicate for the events of a type, or of all types with a prefix such as `order.*`.

    The predicate is pure and fast: a relay calls it for every event. `path` names the field that the rule is about, and
    `on_invalid` replaces the treatment of the other checks for this rule.

    >>> rule = Rule("total is positive", "order.*", lambda facts, payload: payload["total"] > 0)
    >>> rule.applies_to("order.placed"), rule.applies_to("stock.reserved")
    (True, False)
    """

    name: str
    event_types: str
    predicate: Predicate
    path: str = "payload"
    on_invalid: OnInvalid | str | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.event_types or "*" in self.event_types[:-1]:
            raise UsageError(
                f"the rule {self.name!r} for {self.event_types!r} cannot work; give it a name, and an event type or a "
                "prefix such as order.*"
            )
        if self.on_invalid is not None:
            object.__setattr__(self, "on_invalid", treatment(self.on_invalid))

    def applies_to(self, event_type: str) -> bool:
        """Return whether the rule is for an event type."""
        if self.event_types.endswith("*"):
            return event_type.startswith(self.event_types[:-1])
        return event_type == self.event_types

    def problem(self, facts: PayloadFacts, payload: Any) -> tuple[str, str] | None:
        """Return the path and the text of a problem. An exception of the predicate is a problem, without its text.

        The text of the exception may repeat the payload.
        """
        try:
            found = self.predicate(facts, payload)
        except Exception as error:
            return self.path, f"the rule {self.name!r} raised {type(error).__name__}"
        if found is None or found is True:
            return None
        if isinstance(found, RuleProblem):
            return found.path, found.text
        return self.path, found if isinstance(found, str) else f"the rule {self.name!r} is broken"


@dataclass(frozen=True, slots=True)
class RuleProblem:
    """The answer of a predicate that knows which field is wrong."""

    path: str
    text: str


def required_fields(event_types: str, *paths: str, on_invalid: OnInvalid | str | None = None) -> Rule:
    """Return the rule that fields are present and not null, for a type or a prefix; paths are dotted.

    >>> rule = required_fields("order.*", "customer.id")
    >>> rule.problem(PayloadFacts(None, "order.placed", 1, "orders", None), {"customer": {}})
    ('payload.customer.id', 'it is required')
    """
    if not paths:
        raise UsageError(f"required_fields({event_types!r}) names no field; name one, such as 'customer.id'")

    def has_fields(_: PayloadFacts, payload: Any) -> RuleProblem | None:
        for path in paths:
            if field_of(payload, path) in (MISSING, None):
                return RuleProblem(f"payload.{path}", "it is required")
        return None

    return Rule(f"required fields {', '.join(paths)}", event_types, has_fields, on_invalid=on_invalid)


@dataclass(frozen=True, slots=True)
class IncreasingField:
    """A field whose value must be above the value of the event before, in each stream; see `strictly_increasing`."""

    name: str
    event_types: str
    field: str
    on_invalid: OnInvalid | str | None = None

    @property
    def path(self) -> str:
        """Return the path of the field in errors."""
        return f"payload.{self.field}"

    def presence(self) -> Rule:
        """Return the rule that the field is a whole number, which staging can check, too."""

        def is_number(_: PayloadFacts, payload: Any) -> RuleProblem | None:
            return None if self.value(payload) is not None else RuleProblem(self.path, "it is not a whole number")

        return Rule(self.name, self.event_types, is_number, self.path, self.on_invalid)

    def value(self, payload: Any) -> int | None:
        """Return the value of the field, None unless it is a whole number of 64 bits."""
        found = field_of(payload, self.field)
        return found if type(found) is int and -(2**63) <= found < 2**63 else None


def strictly_increasing(
    event_types: str, field: str, *, name: str | None = None, on_invalid: OnInvalid | str | None = None
) -> IncreasingField:
    """Return the rule that a whole number grows with every event of a key, for a type or a prefix.

    The relay judges it, also for rows of other programs: a stream has one relay at a time, and the last value is kept
    in the store. Staging checks only that the field is a number. The name must stay the same, because values are kept
    under it.

    >>> strictly_increasing("order.*", "revision").name
    'order.* increasing revision'
    """
    rule = IncreasingField(name or f"{event_types} increasing {field}", event_types, field, on_invalid)
    rule.presence()
    return rule


def treatment(word: OnInvalid | str) -> OnInvalid:
    """Return the treatment that a word names.

    >>> treatment("warn")
    <OnInvalid.WARN: 'warn'>
    """
    try:
        return OnInvalid(word)
    except ValueError:
        raise UsageError(f"on_invalid={word!r} is not known; use {', '.join(OnInvalid)}") from None
