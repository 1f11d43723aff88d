"""Threads that do one job after another: a transaction lives on one of them from its beginning to its end.

They end with the process, whatever they are doing: a function that never returns must not keep it alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from outrider.errors import Transient

P = ParamSpec("P")
T = TypeVar("T")

WAIT_SECONDS = 60.0


class Thread:
    """One thread and its jobs."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do a job after those before it. It is done even if nobody waits for it any more."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def do() -> None:
            try:
                future.set_result(job(*args, **kwargs))
            except StopIteration as error:
                # No future can carry one, and whoever waits for it would wait for ever.
                stopped = RuntimeError("the handler raised StopIteration")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(do)
        return future

    async def do(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job, and wait for it."""
        return await asyncio.wrap_future(self.submit(job, *args, **kwargs))

    def end(self) -> None:
        """Let the thread end when it has done what it has been given."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


class Threads:
    """A few threads, made when they are first needed; one that is busy for ever is one less."""

    def __init__(self, count_max: int, name: str) -> None:
        self._room = asyncio.Semaphore(count_max)
        self._count_max, self._name = count_max, name
        self._idle: list[Thread] = []
        self._closed = False

    async def take(self) -> Thread:
        """Return a thread that has nothing to do; wait for one if there are as many as there may be."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._room.acquire()
        except TimeoutError as error:
            raise Transient(
                f"all {self._count_max} threads for `transactions` have been busy for {WAIT_SECONDS:.0f} s; give what "
                "your handlers wait for a time limit"
            ) from error
        return self._idle.pop() if self._idle else Thread(self._name)

    def give(self, thread: Thread) -> None:
        """Take a thread back."""
        self._room.release()
        if self._closed:
            thread.end()
        else:
            self._idle.append(thread)

    def give_later(self, thread: Thread, done: Future[Any]) -> None:
        """Take a thread back when a job of it is done."""
        loop = asyncio.get_running_loop()

        def back(_: Future[Any]) -> None:
            # Without the event loop there is nobody left to use it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self.give, thread)

        done.add_done_callback(back)

    async def close(self, farewell: Callable[[], object]) -> None:
        """End all threads, each with a last job. Those that are busy end by themselves."""
        self._closed = True
        while self._idle:
            thread = self._idle.pop()
            await thread.do(farewell)
            thread.end()
