"""Wake-ups by a change stream: the server reports committed events.

Each lone insert wakes the relay. During a burst the listener closes the stream and opens a new stream after a short
pause, so that the server does not send a change for every event. One more wake-up covers the inserts in between. A
relay with a backlog needs no wake-up, and a stream would report all writes of the relay itself. Therefore the listener
opens no stream during a backlog.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pymongo.errors import PyMongoError

from outrider.stores.mongo.database import MongoDatabase

PAUSE_SECONDS = 0.02
"""The pause between two streams during a burst: inserts that follow each other faster are a burst."""

CANCEL_SECONDS = 0.1
RETRY_SECONDS_MAX = 30.0

LOOK_MILLISECONDS = 1000
"""The time that the server waits for a change before an empty reply."""

BACKLOG_EVENTS, BACKLOG_SECONDS = 500, 0.5
"""A fetch of at least so many events is a backlog. The backlog ends after so many seconds without such a fetch."""

_INSERTS: list[dict[str, Any]] = [{"$match": {"operationType": "insert"}}, {"$project": {"_id": 1}}]


class Backlog:
    """The state of a backlog, in which a relay needs no wake-ups.

    >>> backlog = Backlog()
    >>> backlog.fetched(2_000)
    >>> backlog.seconds_left() > 0
    True
    """

    def __init__(self) -> None:
        self._until = 0.0

    def fetched(self, events: int) -> None:
        """Record the number of events in a fetch."""
        if events >= BACKLOG_EVENTS:
            self._until = time.monotonic() + BACKLOG_SECONDS

    def seconds_left(self) -> float:
        """Return the expected duration of the backlog, 0 without a backlog."""
        return max(0.0, self._until - time.monotonic())


@asynccontextmanager
async def listening(
    database: MongoDatabase, wake: Callable[[], None], name: str = "outbox", backlog: Backlog | None = None
) -> AsyncIterator[None]:
    """Call `wake` after documents were committed to a collection. A lost stream is replaced; polling covers the gap."""
    task = asyncio.create_task(_listen(database, wake, name, backlog or Backlog()), name="outrider-mongo-wakeups")
    try:
        yield
    finally:
        # The driver may ignore a cancellation while a stream closes.
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_SECONDS)


async def _listen(database: MongoDatabase, wake: Callable[[], None], name: str, backlog: Backlog) -> None:
    pause = 1.0
    while True:
        try:
            while True:
                await _listen_once(database, wake, name, backlog)
                pause = 1.0
                await asyncio.sleep(max(PAUSE_SECONDS, backlog.seconds_left()))
        except PyMongoError:
            # Relays poll after any error here; other calls to the server report the cause.
            await asyncio.sleep(pause)
            pause = min(RETRY_SECONDS_MAX, pause * 2)


async def _listen_once(database: MongoDatabase, wake: Callable[[], None], name: str, backlog: Backlog) -> None:
    """Call `wake` for each insert until a burst. The first call covers inserts before the start of the stream."""
    async with await database[name].watch(_INSERTS, max_await_time_ms=LOOK_MILLISECONDS, batch_size=1) as changes:
        wake()
        last = float("-inf")
        # The stream ends without a change if the collection is dropped.
        while changes.alive and not backlog.seconds_left():
            if await changes.try_next() is None:
                continue
            if time.monotonic() - last < PAUSE_SECONDS:
                break
            last = time.monotonic()
            wake()
        wake()
