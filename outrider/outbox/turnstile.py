"""One publish after the other, or side by side: when a publish may begin, and that it ends.

Whatever an adapter does, each message has a verdict in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from outrider.broker import Broker
from outrider.event import Message
from outrider.outcome import Unresolved, Verdict


class Turnstile:
    """Lets waves through side by side, and a suspect only by itself: a fault must have one possible cause."""

    def __init__(self) -> None:
        self._entry = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passing(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn, and hold it for the block. A suspect keeps the entry while it waits, so none starves."""
        async with self._entry:
            if alone:
                await self._empty.wait()
                yield
                return
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()


async def publish(broker: Broker, messages: list[Message], seconds: float) -> Sequence[Verdict]:
    """Publish with a time limit. Whatever the adapter does, each message has a verdict in the end."""
    try:
        async with asyncio.timeout(seconds):
            verdicts = await broker.publish(messages)
        if len(verdicts) != len(messages):
            return [Unresolved(f"{len(verdicts)} verdicts for {len(messages)} messages")] * len(messages)
        return verdicts
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled us: a future inside the client was, and that says nothing about any message.
        return [Unresolved("the broker's client cancelled the publish")] * len(messages)
    except TimeoutError:
        return [Unresolved(f"no verdict from the broker within {seconds:g} s")] * len(messages)
    except Exception as error:
        # An adapter that raises has told us nothing about any message; the error is reported with the verdict.
        return [Unresolved(f"{type(error).__name__}: {error}")] * len(messages)
