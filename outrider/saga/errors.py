"""What can go wrong with a saga, beside what can go wrong anywhere.

Misuse
└── BadState        a state cannot be stored, or read back; `path` names the field
Permanent
├── Refused         a step did not happen, and will not
└── AlreadyStarted  there is a saga of that type and correlation id
"""

from __future__ import annotations

from outrider.errors import Misuse, Permanent


class Refused(Permanent):
    """Raised by a step: it did not happen and will not, so what was done before it is undone.

    >>> raise Refused("the card was declined")
    Traceback (most recent call last):
    ...
    outrider.saga.errors.Refused: the card was declined
    """


class AlreadyStarted(Permanent):
    """A saga of that type and correlation id is there, and `start` was told that it must be new.

    >>> raise AlreadyStarted("there is a saga order A-7 already")
    Traceback (most recent call last):
    ...
    outrider.saga.errors.AlreadyStarted: there is a saga order A-7 already
    """


class BadState(Misuse):
    """A saga's state cannot be stored, or what is stored does not fit its type.

    >>> raise BadState("Order.price", "nan is not JSON", "store None or a number")
    Traceback (most recent call last):
    ...
    outrider.saga.errors.BadState: Order.price: nan is not JSON; store None or a number
    """

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path, self.problem = path, problem
