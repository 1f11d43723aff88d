"""One transaction of the application's own kind, as a lender sees it; and when it is not the one any more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from outrider.drivers.lending.below import Below
from outrider.drivers.lending.failures import FAILED, sqlstate_of

SAVEPOINT = "a statement that may fail needs a savepoint of its own: {0}"


class Work(ABC):
    """A transaction. What changes it is awaited if the kind is asynchronous, and on its own thread if it is not."""

    SAVEPOINT: str
    """How a savepoint is made with this kind."""

    given: Any
    below: Below

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether the application has ended it by means of its own kind. The connection may be another's by then."""

    @property
    def spoilt(self) -> bool:
        """Whether an error was swallowed that has undone it; `settle` says so."""
        return False

    @property
    def ended(self) -> bool:
        """Whether the application has ended it by whatever means, so that it is not the one that was lent."""
        return self.gone or not (self.spoilt or self.below.closed or self.below.begun)

    @abstractmethod
    def begin(self) -> Any:
        """Begin for good, where a kind puts that off until the first statement."""

    @abstractmethod
    def settle(self) -> Any:
        """Write what a function has left to be written; raise if nothing can be."""

    @abstractmethod
    def commit(self) -> Any:
        """Commit."""

    @abstractmethod
    def rollback(self) -> Any:
        """Roll back."""

    @abstractmethod
    def release(self) -> Any:
        """Give the connection back."""

    def sever(self) -> None:
        """Cut the connection off, if it is this transaction's still."""
        if not self.gone:
            self.below.sever()

    def forbidden(self, error: BaseException) -> bool:
        """Tell whether an error says that the application has tried to end it, and was not let."""
        return False

    def explain(self, error: BaseException) -> None:
        """Add what to do about a transaction that takes no more statements."""
        if sqlstate_of(error) == FAILED:
            error.add_note(SAVEPOINT.format(self.SAVEPOINT))
