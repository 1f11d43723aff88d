"""An event loop on a background thread, for applications without an event loop.

The thread ends with the process. A forked child process does not inherit the thread, and gets a new thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """An event loop on a thread. The first use starts the thread; `close` ends it.

    >>> background = Background("example")
    >>> async def answer():
    ...     return 42
    >>> background.run(answer()).result()
    42
    >>> background.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop."""
        loop = self._loop
        if loop is None or self._process != os.getpid():
            return self._start()
        return loop

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; any other thread can wait for the result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Stop the loop and wait for the thread. A second call has no effect."""
        with self._starting:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None and self._process == os.getpid():
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None or self._process != os.getpid():
                self._loop = asyncio.new_event_loop()
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop


_shared = Background("outrider-background")


def shared() -> Background:
    """Return the default background loop of the process.

    >>> shared() is shared()
    True
    """
    return _shared
