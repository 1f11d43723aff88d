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


def treatment(word: OnInvalid | str) -> OnInvalid:
    """Return the treatment that a word names.

    >>> treatment("warn")
    <OnInvalid.WARN: 'warn'>
    """
    try:
        return OnInvalid(word)
    except ValueError:
        raise UsageError(f"on_invalid={word!r} is not known; use {', '.join(OnInvalid)}") from None
