"""The sagas that a worker runs, by type and version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from outrider.errors import Misuse
from outrider.saga.check import check_name
from outrider.saga.definition import Saga


class Sagas:
    """Sagas that are run together; versions of one type stand side by side until the old one's have ended.

    Where two services on one broker have a saga of the same type, each names its own, so that neither consumes what
    answers the other. Run them with `outrider saga run module:sagas`::

        sagas = Sagas(order, refund, name="shop")

    With `transactions`, a factory of SQLAlchemy's sessions for instance, local steps get a transaction of that kind.
    """

    def __init__(self, *sagas: Saga[Any], name: str | None = None, transactions: Any = None) -> None:
        if not sagas:
            raise Misuse("there are no sagas to run; name them: Sagas(order, refund)")
        self.name = None if name is None else check_name(name, "sagas", "Sagas(…, name=…)")
        self.transactions = transactions
        self._sagas: dict[tuple[str, int], Saga[Any]] = {}
        for saga in sagas:
            self._add(saga)

    def __iter__(self) -> Iterator[Saga[Any]]:
        return iter(self._sagas.values())

    def __len__(self) -> int:
        return len(self._sagas)

    @classmethod
    def of(cls, found: Any) -> Sagas:
        """Return what somebody means who names a Saga, several of them, or Sagas.

        >>> Sagas.of("order")
        Traceback (most recent call last):
        ...
        outrider.errors.Misuse: 'order' is no saga; name a Saga, a list of them, or Sagas(…)
        """
        if isinstance(found, Sagas):
            return found
        if isinstance(found, Saga):
            return cls(found)
        if isinstance(found, Iterable) and not isinstance(found, str | bytes):
            return cls(*found)
        raise Misuse(f"{found!r} is no saga; name a Saga, a list of them, or Sagas(…)")

    def consumer(self, saga_type: str) -> str:
        """Return the name of the consumer that receives the replies of a type.

        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Order:
        ...     order_id: str
        >>> order = Saga("order", Order)
        >>> _ = order.sleep(seconds=60, name="cool_down")
        >>> Sagas(order).consumer("order"), Sagas(order, name="shop").consumer("order")
        ('saga.order', 'shop.saga.order')
        """
        return f"saga.{saga_type}" if self.name is None else f"{self.name}.saga.{saga_type}"

    @property
    def topics(self) -> list[str]:
        """Return the topics that commands go to."""
        steps = [step for saga in self for step in saga.definition.steps.values()]
        commands = [act.command for step in steps for act in (step.action, step.undo) if act and act.command]
        return sorted({command.topic for command in commands if command.topic})

    @property
    def versions(self) -> frozenset[tuple[str, int]]:
        """Return the types and versions that are here, which are those a worker may claim."""
        return frozenset(self._sagas)

    def find(self, saga_type: str, version: int) -> Saga[Any] | None:
        """Return the saga of a type and a version, if it is here."""
        return self._sagas.get((saga_type, version))

    def _add(self, saga: Saga[Any]) -> None:
        if not isinstance(saga, Saga):
            raise Misuse(f"{saga!r} is no saga; name them: Sagas(order, refund)")
        saga.check()
        if (known := self.find(saga.saga_type, saga.version)) is not None and known is not saga:
            raise Misuse(
                f"{saga.line}: there is a saga {saga.saga_type} version {saga.version} already, at {known.line}; give "
                "one of them another type or version"
            )
        self._sagas[saga.saga_type, saga.version] = saga
