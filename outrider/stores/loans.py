"""Transactions of the application's own kind: who opens them, and what a store does in them.

A store has connections of its own, and lends those unless it is told to lend somebody else's. What it then hands to its
engine is a loan: the engine passes it on, the store's statements go through it, and the application's function gets
what is in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class Loan(ABC):
    """An open transaction that was lent."""

    given: Any
    """What the application's function gets."""

    @abstractmethod
    async def execute(self, *what: Any) -> Any:
        """Do the store's own work in it: a statement with its parameters, or with SQLite a job for a cursor.

        Errors come in our words, but TimeoutError.
        """

    @abstractmethod
    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        """Run the application's function to its end, and what it has left to be written; return what it returns.

        What it raises passes through. Raises UnfitHandler if the transaction has ended, however the function itself
        has; and TransactionLost if it failed because its connection is gone.
        """

    @abstractmethod
    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a driver's function with what was given, where and how that may be used."""

    @abstractmethod
    def sever(self) -> None:
        """Cut the transaction off from a function that does not end: whatever that still does to it is undone."""


class Lender(Protocol):
    """Opens transactions of one kind."""

    vendor: str
    """The database behind it: `postgresql` or `sqlite`."""

    def transaction(self) -> AbstractAsyncContextManager[Loan]:
        """Open a transaction; commit when the block ends, roll back when it raises."""
        ...

    def objection(self, function: Callable[..., Any]) -> str | None:
        """Say why a function cannot work with this kind, and what to do; None if it can."""
        ...

    async def close(self) -> None:
        """Let go of what the lender itself has made; the application's pools stay its own."""
        ...
