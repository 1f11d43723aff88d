"""Signals, and children that die with their parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


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


def die_with_parent(parent: int) -> None:
    """Ask the kernel to stop this process when its parent ends, however that ends. Other systems than Linux cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
