"""Wake-ups by a change stream: the server says when events were committed.

One insert is enough to wake. While a burst lasts, the stream is closed and opened anew after a moment, so that nobody
has to send or read a change for every single event; and one more wake-up covers what came in between. A relay with a
backlog needs no waking, and the server would look through all that the relay itself writes: there is no stream then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pymongo.errors import PyMongoError

from outrider.stores.mongo.database import Database

PAUSE_SECONDS = 0.02
"""Between two looks during a burst."""

CANCEL_SECONDS = 0.1
RETRY_SECONDS_MAX = 30.0

LOOK_MILLISECONDS = 1000
"""How long the server waits for a change before it says that there is none."""

BACKLOG_EVENTS, BACKLOG_SECONDS = 500, 0.5
"""So many events in one fetch are a backlog, which is over when no such fetch has come for so long."""

_INSERTS: list[dict[str, Any]] = [{"$match": {"operationType": "insert"}}, {"$project": {"_id": 1}}]


class Backlog:
    """Whether there is more to do than anybody needs to be told of.

    >>> backlog = Backlog()
    >>> backlog.fetched(2_000)
    >>> backlog.seconds_left() > 0
    True
    """

    def __init__(self) -> None:
        self._until = 0.0

    def fetched(self, events: int) -> None:
        """Take note of how much a fetch has found."""
        if events >= BACKLOG_EVENTS:
            self._until = time.monotonic() + BACKLOG_SECONDS

    def seconds_left(self) -> float:
        """Return how long it is thought to last, 0 if there is none."""
        return max(0.0, self._until - time.monotonic())


@asynccontextmanager
async def listening(
    database: Database, wake: Callable[[], None], name: str = "outbox", backlog: Backlog | None = None
) -> AsyncIterator[None]:
    """Call `wake` when documents were committed to a collection. A lost stream is replaced; polling covers the gap."""
    task = asyncio.create_task(_listen(database, wake, name, backlog or Backlog()), name="outrider-mongo-wakeups")
    try:
        yield
    finally:
        # The driver may swallow a cancellation that comes while it closes a stream.
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_SECONDS)


async def _listen(database: Database, wake: Callable[[], None], name: str, backlog: Backlog) -> None:
    pause = 1.0
    while True:
        try:
            while True:
                await _listen_once(database, wake, name, backlog)
                pause = 1.0
                await asyncio.sleep(max(PAUSE_SECONDS, backlog.seconds_left()))
        except PyMongoError:
            # Whatever it is, relays poll; and what is wrong with the server is said by whoever needs an answer.
            await asyncio.sleep(pause)
            pause = min(RETRY_SECONDS_MAX, pause * 2)


async def _listen_once(database: Database, wake: Callable[[], None], name: str, backlog: Backlog) -> None:
    """Wait for one insert. What was inserted before the stream was open is covered by the first call."""
    async with await database[name].watch(_INSERTS, max_await_time_ms=LOOK_MILLISECONDS, batch_size=1) as changes:
        wake()
        # It ends without a change if the collection is dropped.
        while changes.alive and not backlog.seconds_left():
            if await changes.try_next() is not None:
                break
        wake()
