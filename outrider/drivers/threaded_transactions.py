"""Handler transactions of synchronous drivers: each transaction runs on a separate thread."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from outrider import handler_transactions
from outrider.drivers.async_transactions import OpenTransaction, in_time, limited
from outrider.drivers.connections import is_farewell, translate_errors
from outrider.errors import InvalidHandler, TransactionLost, Transient
from outrider.handler_transactions import GENERATOR, TRANSACTION_ENDED, HandlerTransaction
from outrider.redaction import without_values

ASYNCHRONOUS = (
    "is asynchronous, and the transaction that it gets is not; write it as a plain `def`, which runs on a thread, or "
    "let `transactions` be of an asynchronous kind"
)

P = ParamSpec("P")

T = TypeVar("T")

WAIT_SECONDS = 60.0


class ThreadedHandlerTransaction(HandlerTransaction):
    """A handler transaction on a thread."""

    def __init__(self, thread: Thread, work: OpenTransaction) -> None:
        self._thread, self._work, self.connection = thread, work, work.connection
        self.left = False
        """Whether the caller has stopped waiting while the thread still runs a job."""
        self._entered = False

    async def execute(self, *what: Any) -> Any:
        with translate_errors(self._work.explain):
            return await limited(self._do(self._work.raw.execute, *what))

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        context = contextvars.copy_context()
        try:
            return await self._do(context.run, self._call, function, argument)
        except asyncio.CancelledError:
            if self.left and self._entered and self._work.ended:
                raise InvalidHandler(TRANSACTION_ENDED) from None
            raise

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        with translate_errors():
            return await limited(self._do(function, self.connection, *args))

    def abort(self) -> None:
        self._work.abort()

    def _call(self, function: Callable[..., Any], argument: Any) -> Any:
        """Run the application's function on the thread of its transaction."""
        work = self._work
        with translate_errors():
            work.begin()
        self._entered = True
        try:
            returned = _returned(function(argument, self.connection))
            if not work.ended:
                work.settle()
            return returned
        except Exception as error:
            if work.forbidden(error):
                raise InvalidHandler(TRANSACTION_ENDED) from error
            if _lost(work, error):
                raise TransactionLost(f"the connection was lost under a handler ({without_values(error)})") from error
            work.explain(error)
            raise
        finally:
            if work.ended:
                raise InvalidHandler(TRANSACTION_ENDED)

    async def _do(self, job: Callable[..., Any], *args: Any) -> Any:
        future = self._thread.submit(job, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # A running thread cannot be stopped, but its writes are rolled back.
            if not future.done():
                self.left = True
                self.abort()
            raise


class ThreadedTransactionSource(ABC):
    """Opens transactions on threads, up to the size of the pool."""

    vendor: str

    def __init__(self, transactions_max: int) -> None:
        self._threads = Threads(transactions_max, "outrider-handler")

    @abstractmethod
    def begin(self) -> OpenTransaction:
        """Begin a transaction on its thread. A failure must release all resources."""

    def farewell(self) -> None:  # noqa: B027 - most kinds keep nothing
        """Release resources kept for a thread that ends."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        thread = await self._threads.get()
        opening = thread.submit(self.begin)
        try:
            with translate_errors():
                work = await in_time(asyncio.shield(asyncio.wrap_future(opening)))
        except BaseException:
            self._threads.put_when_done(thread, thread.submit(_abandon_late, opening))
            raise
        tx = ThreadedHandlerTransaction(thread, work)
        try:
            yield tx
            await _commit(thread, tx, work)
        except BaseException:
            ending = thread.submit(_abandon, work)
            self._threads.put_when_done(thread, ending)
            if not tx.left:
                await _wait_result(ending, work)
            raise
        releasing = thread.submit(_release, work)
        self._threads.put_when_done(thread, releasing)
        await _wait_result(releasing, work)

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        if generator := handler_transactions.check_handler(function):
            return generator
        shapes = (function, inspect.unwrap(function), type(function).__call__)
        return ASYNCHRONOUS if any(inspect.iscoroutinefunction(shape) for shape in shapes) else None

    async def close(self) -> None:
        await self._threads.close(self.farewell)


def _returned(result: Any) -> Any:
    if handler_transactions.lazy(result):
        raise InvalidHandler(GENERATOR)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidHandler(ASYNCHRONOUS)
    return result


def _lost(work: OpenTransaction, error: Exception) -> bool:
    if work.is_lost:
        return False
    if is_farewell(error) and not work.raw.closed:
        work.raw.probe()
    return work.raw.closed


async def _commit(thread: Thread, tx: ThreadedHandlerTransaction, work: OpenTransaction) -> None:
    if work.is_lost:
        raise InvalidHandler(TRANSACTION_ENDED)
    committing = thread.submit(work.commit)
    try:
        with translate_errors():
            await in_time(asyncio.shield(asyncio.wrap_future(committing)))
    except BaseException as error:
        if not committing.done():
            # After an unknown outcome the connection must not be reused.
            tx.left = True
            work.abort()
        work.explain(error.__cause__ or error)
        raise


async def _wait_result(ending: Future[None], work: OpenTransaction) -> None:
    """Wait for the last job of a transaction, with a time limit."""
    try:
        await limited(asyncio.shield(asyncio.wrap_future(ending)))
    except TimeoutError:
        work.abort()


def _abandon_late(opening: Future[OpenTransaction]) -> None:
    """Roll back a transaction that was opened after its caller had stopped waiting."""
    if opening.exception() is None:
        _abandon(opening.result())


def _abandon(work: OpenTransaction) -> None:
    """Roll back, or close the connection to make the server roll back."""
    try:
        work.rollback()
    except Exception:
        work.abort()
    _release(work)


def _release(work: OpenTransaction) -> None:
    # The outcome of the transaction is final. The pool discards a connection that cannot be returned.
    with suppress(Exception):
        work.release()


class Thread:
    """A thread and its queue of jobs."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job. The job runs even if its caller stops waiting."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def do() -> None:
            try:
                future.set_result(job(*args, **kwargs))
            except StopIteration as error:
                # A future cannot carry StopIteration: the caller would wait for ever.
                stopped = RuntimeError("the handler raised StopIteration")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(do)
        return future

    async def do(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job and wait for the result."""
        return await asyncio.wrap_future(self.submit(job, *args, **kwargs))

    def end(self) -> None:
        """End the thread after its queued jobs."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


class Threads:
    """A bounded set of threads, created on demand. A thread whose job never ends is lost."""

    def __init__(self, count_max: int, name: str) -> None:
        self._room = asyncio.Semaphore(count_max)
        self._count_max, self._name = count_max, name
        self._idle: list[Thread] = []
        self._closed = False

    async def get(self) -> Thread:
        """Return an idle thread; at the limit, wait until a thread is returned."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._room.acquire()
        except TimeoutError as error:
            raise Transient(
                f"all {self._count_max} threads for `transactions` have been busy for {WAIT_SECONDS:.0f} s; give what "
                "your handlers wait for a time limit"
            ) from error
        return self._idle.pop() if self._idle else Thread(self._name)

    def put(self, thread: Thread) -> None:
        """Return a thread to the idle threads."""
        self._room.release()
        if self._closed:
            thread.end()
        else:
            self._idle.append(thread)

    def put_when_done(self, thread: Thread, done: Future[Any]) -> None:
        """Return a thread to the idle threads when a job is done."""
        loop = asyncio.get_running_loop()

        def on_done(_: Future[Any]) -> None:
            # Without the event loop the thread cannot be used again.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self.put, thread)

        done.add_done_callback(on_done)

    async def close(self, farewell: Callable[[], object]) -> None:
        """End all idle threads, after a last job. Busy threads end after their job."""
        self._closed = True
        while self._idle:
            thread = self._idle.pop()
            await thread.do(farewell)
            thread.end()
