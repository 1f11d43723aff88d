"""An observer that remembers, for tests to ask."""

from __future__ import annotations

from typing import TypeVar

from outrider.observer import Fact

F = TypeVar("F", bound=Fact)


class Notebook:
    """Keeps every fact, in order.

    >>> Notebook().of(Fact)
    []
    """

    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def notice(self, fact: Fact) -> None:
        """Write the fact down."""
        self.facts.append(fact)

    def of(self, kind: type[F]) -> list[F]:
        """Return the facts of one kind."""
        return [fact for fact in self.facts if isinstance(fact, kind)]
