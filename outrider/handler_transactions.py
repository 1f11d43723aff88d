"""Handler transactions: the transaction in which a store and the application's function write together.

An inbox store and a saga store work through a `HandlerTransaction`. The handler, or the step's function, gets the
transaction's `connection`. A `TransactionSource` opens transactions: on connections of the store, or of the kind that
the application uses (SQLAlchemy, psycopg, Django).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

TRANSACTION_ENDED = (
    "ended the transaction, so that only a part of what belongs together may be committed; leave "
    "commit and rollback to outrider"
)
"""A handler, or a step's function, has committed or rolled back by itself."""

GENERATOR = "has a yield in it, so that a call of it runs nothing; take the yield out"

_AWAITABLES = ("Awaitable", "Coroutine", "Future", "Task")


class HandlerTransaction(ABC):
    """An open transaction, shared by a store and a function of the application."""

    connection: Any
    """The argument of the application's function: a connection, or a session."""

    transaction_id: int | None = None
    """The database's number of the transaction, once a statement of the store has read it (PostgreSQL only)."""

    @abstractmethod
    async def execute(self, *statement: Any) -> Any:
        """Run a statement of the store: SQL with parameters, with SQLite a function of a cursor.

        Driver errors are translated, except TimeoutError.
        """

    @abstractmethod
    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        """Run the application's function to its end and flush its pending writes; return its result.

        Exceptions of the function pass through. Raises InvalidHandler if the function has ended the transaction,
        and TransactionLost if the function failed because the connection is gone.
        """

    @abstractmethod
    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a driver's function with the connection, on the thread that owns it. Driver errors are translated."""

    @abstractmethod
    def abort(self) -> None:
        """Cut the transaction off from a function that does not end: later writes of the function are rolled back."""


class WrappedTransaction(HandlerTransaction):
    """A handler transaction to which a store adds a check. All other calls pass to the inner transaction."""

    def __init__(self, inner: HandlerTransaction) -> None:
        self._inner, self.connection = inner, inner.connection

    @property
    def transaction_id(self) -> int | None:
        return self._inner.transaction_id

    @transaction_id.setter
    def transaction_id(self, number: int | None) -> None:
        self._inner.transaction_id = number

    async def execute(self, *statement: Any) -> Any:
        return await self._inner.execute(*statement)

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        return await self._inner.call(function, argument)

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._inner.through(function, *args)

    def abort(self) -> None:
        self._inner.abort()


class TransactionSource(Protocol):
    """Opens handler transactions of one kind."""

    @property
    def vendor(self) -> str:
        """Return the database behind the source: `postgresql`, `sqlite`, `mongodb` or `memory`."""
        ...

    def open(self) -> AbstractAsyncContextManager[HandlerTransaction]:
        """Open a transaction; commit when the block ends, roll back when the block raises."""
        ...

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        """Return the reason why a function cannot work with the transactions, and the remedy; None if it can."""
        ...

    async def close(self) -> None:
        """Close the connections and threads of the source; the application's pools stay open."""
        ...


def check_handler(function: Callable[..., Any]) -> str | None:
    """Return the reason why no store can run a function; None if the function is valid.

    >>> def create(run, tx): yield
    >>> check_handler(create)
    'has a yield in it, so that a call of it runs nothing; take the yield out'
    """
    shapes = (function, inspect.unwrap(function), type(function).__call__)
    found = any(inspect.isgeneratorfunction(shape) or inspect.isasyncgenfunction(shape) for shape in shapes)
    return GENERATOR if found else None


def lazy(result: Any) -> bool:
    """Return whether a result is a generator, which runs only when iterated.

    >>> lazy(number for number in range(3))
    True
    """
    return inspect.isgenerator(result) or inspect.isasyncgen(result)


def returns_awaitable(handler: Callable[..., Any]) -> bool:
    """Return whether a handler returns an awaitable, or may do so: with a lambda only a call can show.

    >>> returns_awaitable(print)
    False
    """
    shapes = (handler, inspect.unwrap(handler), type(handler).__call__)
    return any(inspect.iscoroutinefunction(shape) for shape in shapes) or _declares_awaitable(handler)


def _declares_awaitable(handler: Callable[..., Any]) -> bool:
    """Return whether a plain function is annotated to return an awaitable. A lambda may return any value, so True."""
    if getattr(handler, "__name__", "") == "<lambda>":
        return True
    try:
        returned = str(inspect.signature(handler).return_annotation)
    except (TypeError, ValueError):
        return False
    return any(awaitable in returned for awaitable in _AWAITABLES)
