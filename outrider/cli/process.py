"""Signals, children that die with their parent, and when to look for garbage."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
_OBJECTS_BETWEEN_COLLECTIONS = 50_000


@contextmanager
def on_stop_signals(stop: Callable[[], None], *, give_up_seconds: float) -> Iterator[None]:
    """Call `stop` on the first signal; end the process on the second, or when the clean stop takes too long."""
    loop = asyncio.get_running_loop()
    asked: list[int] = []

    def on_signal(number: int) -> None:
        asked.append(number)
        if len(asked) > 1:
            os._exit(128 + number)
        loop.call_later(give_up_seconds, os._exit, 128 + number)
        stop()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Keep the collector away from events, which are never part of a cycle; it took a fifth of a busy relay's time.

    What is loaded already stays for good, and need not be looked at again. ::

        with collecting_rarely():
            await relay.run()
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to stop this process when its parent ends, however that ends. Other systems than Linux cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
