"""Lending transactions of kinds that are not asynchronous: plain functions, each transaction on a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

from outrider.drivers.lending.awaited import in_time, limited
from outrider.drivers.lending.failures import is_farewell, told
from outrider.drivers.lending.threads import Thread, Threads
from outrider.drivers.lending.work import Work
from outrider.errors import TransactionLost, UnfitHandler
from outrider.stores import lending
from outrider.stores.lending import ENDED, GENERATOR
from outrider.stores.loans import Loan

ASYNCHRONOUS = (
    "is asynchronous, and the transaction that it gets is not; write it as a plain `def`, which runs on a thread, or "
    "let `transactions` be of an asynchronous kind"
)


class ThreadedLoan(Loan):
    """A transaction on a thread."""

    def __init__(self, thread: Thread, work: Work) -> None:
        self._thread, self._work, self.given = thread, work, work.given
        self.left = False
        """Whether somebody has stopped waiting for what the thread is still doing."""
        self._entered = False

    async def execute(self, *what: Any) -> Any:
        with told(self._work.explain):
            return await limited(self._do(self._work.below.execute, *what))

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        context = contextvars.copy_context()
        try:
            return await self._do(context.run, self._call, function, argument)
        except asyncio.CancelledError:
            if self.left and self._entered and self._work.ended:
                raise UnfitHandler(ENDED) from None
            raise

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        with told():
            return await limited(self._do(function, self.given, *args))

    def sever(self) -> None:
        self._work.sever()

    def _call(self, function: Callable[..., Any], argument: Any) -> Any:
        """Run the application's function, on the thread of its transaction."""
        work = self._work
        with told():
            work.begin()
        self._entered = True
        try:
            returned = _returned(function(argument, self.given))
            if not work.ended:
                work.settle()
            return returned
        except Exception as error:
            if work.forbidden(error):
                raise UnfitHandler(ENDED) from error
            if _lost(work, error):
                raise TransactionLost(f"the connection was lost under a handler ({error})") from error
            work.explain(error)
            raise
        finally:
            if work.ended:
                raise UnfitHandler(ENDED)

    async def _do(self, job: Callable[..., Any], *args: Any) -> Any:
        future = self._thread.submit(job, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # Nobody can stop the thread, but what it does to the database comes to nothing.
            if not future.done():
                self.left = True
                self.sever()
            raise


class ThreadedLender(ABC):
    """Opens transactions on threads, not more at a time than the pool keeps."""

    vendor: str

    def __init__(self, lendable: int) -> None:
        self._threads = Threads(lendable, "outrider-lent")

    @abstractmethod
    def open(self) -> Work:
        """Begin a transaction, on its thread. What fails leaves nothing behind."""

    def farewell(self) -> None:  # noqa: B027 - most kinds keep nothing
        """Let go of what is kept for a thread that ends."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Loan]:
        thread = await self._threads.take()
        opening = thread.submit(self.open)
        try:
            with told():
                work = await in_time(asyncio.shield(asyncio.wrap_future(opening)))
        except BaseException:
            self._threads.give_later(thread, thread.submit(_abandon_late, opening))
            raise
        loan = ThreadedLoan(thread, work)
        try:
            yield loan
            await _commit(thread, loan, work)
        except BaseException:
            ending = thread.submit(_abandon, work)
            self._threads.give_later(thread, ending)
            if not loan.left:
                await _waited(ending, work)
            raise
        releasing = thread.submit(_release, work)
        self._threads.give_later(thread, releasing)
        await _waited(releasing, work)

    def objection(self, function: Callable[..., Any]) -> str | None:
        if generator := lending.objection(function):
            return generator
        shapes = (function, inspect.unwrap(function), type(function).__call__)
        return ASYNCHRONOUS if any(inspect.iscoroutinefunction(shape) for shape in shapes) else None

    async def close(self) -> None:
        await self._threads.close(self.farewell)


def _returned(result: Any) -> Any:
    if lending.lazy(result):
        raise UnfitHandler(GENERATOR)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise UnfitHandler(ASYNCHRONOUS)
    return result


def _lost(work: Work, error: Exception) -> bool:
    if work.gone:
        return False
    if is_farewell(error) and not work.below.closed:
        work.below.probe()
    return work.below.closed


async def _commit(thread: Thread, loan: ThreadedLoan, work: Work) -> None:
    if work.gone:
        raise UnfitHandler(ENDED)
    committing = thread.submit(work.commit)
    try:
        with told():
            await in_time(asyncio.shield(asyncio.wrap_future(committing)))
    except BaseException as error:
        if not committing.done():
            # If it is not known how that ended, nobody may go on with the connection.
            loan.left = True
            work.sever()
        work.explain(error.__cause__ or error)
        raise


async def _waited(ending: Future[None], work: Work) -> None:
    """Wait for the last that a thread does for a transaction; a server that does not answer is not waited for."""
    try:
        await limited(asyncio.shield(asyncio.wrap_future(ending)))
    except TimeoutError:
        work.sever()


def _abandon_late(opening: Future[Work]) -> None:
    """Undo what was begun when nobody waited for it any more."""
    if opening.exception() is None:
        _abandon(opening.result())


def _abandon(work: Work) -> None:
    """Roll back. Where that is not possible, the server does it once the connection is gone."""
    try:
        work.rollback()
    except Exception:
        work.sever()
    _release(work)


def _release(work: Work) -> None:
    # What was decided is decided. A connection that cannot be given back is thrown away by its pool.
    with suppress(Exception):
        work.release()
