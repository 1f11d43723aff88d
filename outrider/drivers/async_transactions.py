"""Handler transactions of asynchronous drivers, on the event loop."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from outrider import handler_transactions
from outrider.drivers.connections import (
    FAILED,
    STATEMENT_SECONDS,
    WHERE,
    RawConnection,
    is_farewell,
    sqlstate_of,
    translate_errors,
)
from outrider.errors import InvalidHandler, TransactionLost, Unreachable
from outrider.handler_transactions import GENERATOR, TRANSACTION_ENDED, HandlerTransaction, returns_awaitable
from outrider.redaction import without_values

T = TypeVar("T")

NOT_ASYNCHRONOUS = (
    "is a plain function, so its calls to an asynchronous transaction would not be awaited; write it as "
    "`async def`, with `await` before every call of the transaction"
)

SAVEPOINT = "a statement that may fail needs a savepoint of its own: {0}"


class AsyncHandlerTransaction(HandlerTransaction):
    """An asynchronous handler transaction."""

    def __init__(self, work: OpenTransaction) -> None:
        self._work, self.connection = work, work.connection

    async def execute(self, *what: Any) -> Any:
        with translate_errors(self._work.explain):
            return await limited(self._work.raw.execute(*what))

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        work = self._work
        with translate_errors():
            await limited(work.begin())
        try:
            returned = await _called(function, argument, self.connection)
            if not work.ended:
                await work.settle()
            return returned
        except Exception as error:
            if work.forbidden(error):
                raise InvalidHandler(TRANSACTION_ENDED) from error
            if await self._lost(error):
                raise TransactionLost(f"the connection was lost under a handler ({without_values(error)})") from error
            work.explain(error)
            raise
        finally:
            if work.ended:
                raise InvalidHandler(TRANSACTION_ENDED)

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        with translate_errors():
            return await function(self.connection, *args)

    def abort(self) -> None:
        self._work.abort()

    async def _lost(self, error: Exception) -> bool:
        if self._work.is_lost:
            return False
        if is_farewell(error) and not self._work.raw.closed:
            await self._work.raw.probe()
        return self._work.raw.closed


class AsyncTransactionSource(ABC):
    """Opens asynchronous transactions, up to the size of the pool."""

    vendor: str

    def __init__(self, transactions_max: int) -> None:
        self._room = asyncio.Semaphore(transactions_max)

    @abstractmethod
    async def begin(self) -> OpenTransaction:
        """Begin a transaction. A failure must release all resources."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        async with self._room:
            with translate_errors():
                work = await in_time(self.begin())
            try:
                try:
                    yield AsyncHandlerTransaction(work)
                except BaseException:
                    await _roll_back(work)
                    raise
                await _commit(work)
            finally:
                # The outcome of the transaction is final. The pool discards a connection that cannot be returned.
                with suppress(Exception):
                    await asyncio.shield(work.release())

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        if generator := handler_transactions.check_handler(function):
            return generator
        return None if returns_awaitable(function) else NOT_ASYNCHRONOUS

    async def close(self) -> None:  # noqa: B027 - most kinds have opened nothing
        """Do nothing: the pool belongs to the application and stays open."""


async def limited(step: Awaitable[T]) -> T:
    """Wait for a step, with a time limit."""
    async with asyncio.timeout(STATEMENT_SECONDS):
        return await step


async def in_time(step: Awaitable[T]) -> T:
    """Wait for the begin or the end of a transaction; a server that does not answer in time counts as unreachable."""
    try:
        return await limited(step)
    except TimeoutError as error:
        raise Unreachable(f"{WHERE} did not answer within {STATEMENT_SECONDS:.0f} s; is it running?") from error


async def _called(function: Callable[..., Any], argument: Any, given: Any) -> Any:
    result = function(argument, given)
    if not inspect.isawaitable(result):
        raise InvalidHandler(GENERATOR if handler_transactions.lazy(result) else NOT_ASYNCHRONOUS)
    return await result


async def _commit(work: OpenTransaction) -> None:
    if work.is_lost:
        raise InvalidHandler(TRANSACTION_ENDED)
    try:
        with translate_errors():
            await in_time(work.commit())
    except BaseException as error:
        # After an unknown outcome the connection must not be reused.
        if isinstance(error, Unreachable | asyncio.CancelledError):
            work.abort()
        work.explain(error.__cause__ or error)
        raise


async def _roll_back(work: OpenTransaction) -> None:
    """Roll back, or close the connection to make the server roll back.

    The error of the block is raised, not an error here.
    """
    try:
        await limited(work.rollback())
    except Exception:
        work.abort()
    except BaseException:
        work.abort()
        raise


class OpenTransaction(ABC):
    """An open transaction of one driver. Methods of asynchronous drivers are awaited; others run on a thread."""

    SAVEPOINT: str
    """The application's way to make a savepoint with this driver."""

    connection: Any
    raw: RawConnection

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the application has ended the transaction through the driver; the connection may be reused."""

    @property
    def is_aborted(self) -> bool:
        """Whether the application has swallowed an error that forces a rollback; `settle` then raises."""
        return False

    @property
    def ended(self) -> bool:
        """Whether the application has ended the transaction by any means."""
        return self.is_lost or not (self.is_aborted or self.raw.closed or self.raw.has_begun)

    @abstractmethod
    def begin(self) -> Any:
        """Begin in the database too, if the driver delays the begin until the first statement."""

    @abstractmethod
    def settle(self) -> Any:
        """Flush pending writes of the function; raise if the transaction accepts no more writes."""

    @abstractmethod
    def commit(self) -> Any:
        """Commit."""

    @abstractmethod
    def rollback(self) -> Any:
        """Roll back."""

    @abstractmethod
    def release(self) -> Any:
        """Return the connection to its pool."""

    def abort(self) -> None:
        """Close the connection, if the transaction still owns it."""
        if not self.is_lost:
            self.raw.abort()

    def forbidden(self, error: BaseException) -> bool:
        """Return whether the driver raised the error because the application tried to end the transaction."""
        return False

    def explain(self, error: BaseException) -> None:
        """Add the remedy to the error of a transaction that accepts no more statements."""
        if sqlstate_of(error) == FAILED:
            error.add_note(SAVEPOINT.format(self.SAVEPOINT))
