"""Lending transactions of kinds that are asynchronous, on the event loop."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from outrider.drivers.lending.below import STATEMENT_SECONDS
from outrider.drivers.lending.failures import WHERE, is_farewell, told
from outrider.drivers.lending.work import Work
from outrider.errors import TransactionLost, UnfitHandler, Unreachable
from outrider.stores import lending
from outrider.stores.lending import ENDED, GENERATOR, promises_to_wait
from outrider.stores.loans import Loan

T = TypeVar("T")

NOT_ASYNCHRONOUS = (
    "is a plain function, and nobody would wait for what it asks of an asynchronous transaction; write it as "
    "`async def`, with `await` before every call of the transaction"
)


class AwaitedLoan(Loan):
    """A transaction that is awaited."""

    def __init__(self, work: Work) -> None:
        self._work, self.given = work, work.given

    async def execute(self, *what: Any) -> Any:
        with told(self._work.explain):
            return await limited(self._work.below.execute(*what))

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        work = self._work
        with told():
            await limited(work.begin())
        try:
            returned = await _called(function, argument, self.given)
            if not work.ended:
                await work.settle()
            return returned
        except Exception as error:
            if work.forbidden(error):
                raise UnfitHandler(ENDED) from error
            if await self._lost(error):
                raise TransactionLost(f"the connection was lost under a handler ({error})") from error
            work.explain(error)
            raise
        finally:
            if work.ended:
                raise UnfitHandler(ENDED)

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        with told():
            return await function(self.given, *args)

    def sever(self) -> None:
        self._work.sever()

    async def _lost(self, error: Exception) -> bool:
        if self._work.gone:
            return False
        if is_farewell(error) and not self._work.below.closed:
            await self._work.below.probe()
        return self._work.below.closed


class AwaitedLender(ABC):
    """Opens transactions that are awaited, not more at a time than the pool keeps."""

    vendor: str

    def __init__(self, lendable: int) -> None:
        self._room = asyncio.Semaphore(lendable)

    @abstractmethod
    async def open(self) -> Work:
        """Begin a transaction. What fails leaves nothing behind."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Loan]:
        async with self._room:
            with told():
                work = await in_time(self.open())
            try:
                try:
                    yield AwaitedLoan(work)
                except BaseException:
                    await _undo(work)
                    raise
                await _commit(work)
            finally:
                # What was decided is decided. A connection that cannot be given back is thrown away by its pool.
                with suppress(Exception):
                    await asyncio.shield(work.release())

    def objection(self, function: Callable[..., Any]) -> str | None:
        if generator := lending.objection(function):
            return generator
        return None if promises_to_wait(function) else NOT_ASYNCHRONOUS

    async def close(self) -> None:  # noqa: B027 - most kinds have opened nothing
        """The pool is the application's."""


async def limited(step: Awaitable[T]) -> T:
    """Wait for a step, and not for ever."""
    async with asyncio.timeout(STATEMENT_SECONDS):
        return await step


async def in_time(step: Awaitable[T]) -> T:
    """Wait for the beginning or the end of a transaction; a server that does not answer in time is away."""
    try:
        return await limited(step)
    except TimeoutError as error:
        raise Unreachable(f"{WHERE} did not answer within {STATEMENT_SECONDS:.0f} s; is it running?") from error


async def _called(function: Callable[..., Any], argument: Any, given: Any) -> Any:
    result = function(argument, given)
    if not inspect.isawaitable(result):
        raise UnfitHandler(GENERATOR if lending.lazy(result) else NOT_ASYNCHRONOUS)
    return await result


async def _commit(work: Work) -> None:
    if work.gone:
        raise UnfitHandler(ENDED)
    try:
        with told():
            await in_time(work.commit())
    except BaseException as error:
        # If it is not known how that ended, nobody may go on with the connection.
        if isinstance(error, Unreachable | asyncio.CancelledError):
            work.sever()
        work.explain(error.__cause__ or error)
        raise


async def _undo(work: Work) -> None:
    """Roll back. Where that is not possible, the server does it once the connection is gone; the block's own error is
    the one to be told.
    """
    try:
        await limited(work.rollback())
    except Exception:
        work.sever()
    except BaseException:
        work.sever()
        raise
