"""Doing many things in order, in small steps, no faster than asked, with a progress bar."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from uuid import UUID

from rich.console import Console
from rich.progress import Progress

STEP_MAX = 500
STEPS_PER_SECOND = 10


async def in_steps(
    ids: Sequence[UUID], rate: float | None, act: Callable[[Sequence[UUID]], Awaitable[int]], *, quiet: bool
) -> int:
    """Act on the ids step by step; return the sum. The bar goes to standard error, and only to a terminal."""
    done, begun = 0, time.monotonic()
    with Progress(console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=len(ids))
        for start, step in steps(ids, rate):
            if rate is not None:
                await asyncio.sleep(max(0.0, begun + start / rate - time.monotonic()))
            done += await act(step)
            bar.advance(task, len(step))
    return done


def steps(ids: Sequence[UUID], rate: float | None) -> Iterator[tuple[int, Sequence[UUID]]]:
    """Cut ids into steps, each with its place: small ones when a rate is to be kept."""
    size = STEP_MAX if rate is None else max(1, min(STEP_MAX, int(rate / STEPS_PER_SECOND)))
    for start in range(0, len(ids), size):
        yield start, ids[start : start + size]
