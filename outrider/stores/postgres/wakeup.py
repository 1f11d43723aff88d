"""Wake-ups: by NOTIFY after a commit, and by looks at the id sequence of the outbox, which every insert moves.

A notification is sent from a separate connection, never inside the business transaction. Looks find events of writers
that send no notification.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import asyncpg

from outrider.errors import OutriderError, UsageError
from outrider.stores.postgres.database import PostgresDatabase, translated

DEBOUNCE_SECONDS = 0.005
"""The minimum time between two notifications of one process; the first after a pause is sent at once."""

LOOK_SECONDS, POOLED_LOOK_SECONDS = 0.025, 0.035
"""The pause between two looks at the id sequence: an event waits half of it in the median. A look through a pooler
costs the server more.
"""

LOOK_SECONDS_MAX = 10.0
"""The time limit of a look."""

CHECK_SECONDS, CHECK_SECONDS_MAX = 15.0, 10.0
"""The pause between two checks of the connection that listens, and the time limit of a check."""

AWAY_SECONDS, FORBIDDEN_SECONDS = 1.0, 30.0
"""The pause after a look that failed, and after a look that the role may not take."""

_log = logging.getLogger(__name__)


class NotificationListener:
    """Sends notifications in batches and listens for notifications of other processes. Behind a pooler, relays poll."""

    def __init__(self, database: PostgresDatabase, channel: str) -> None:
        self._database, self._channel = database, channel
        self._sending: asyncio.Task[None] | None = None
        self._next_at = float("-inf")

    async def send(self) -> None:
        """Notify now, or a moment after the last notification. Calls until then share one notification."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._next_at - now()))
        self._sending = None
        self._next_at = now() + DEBOUNCE_SECONDS
        await self._database.execute("SELECT pg_notify($1, '')", self._channel)

    async def close(self) -> None:
        """Wait for a pending notification."""
        if self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)

    @asynccontextmanager
    async def listening(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Call `wake` on every notification. A lost listener is replaced; polling covers the gap."""
        if self._database.pooled:
            yield
            return
        task = asyncio.create_task(self._listen(wake))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _listen(self, wake: Callable[[], None]) -> None:
        warned = False
        while True:
            listens, error = asyncio.Event(), "the server has closed the connection"
            try:
                await self._listen_once(wake, listens)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, OutriderError) as failure:
                error = f"{type(failure).__name__}: {failure}"
            if listens.is_set() or not warned:
                _log.warning(
                    "the connection that listens for notifications is lost; polling covers the gap",
                    extra={"error": error, "channel": self._channel},
                )
            warned = True
            await asyncio.sleep(AWAY_SECONDS)

    async def _listen_once(self, wake: Callable[[], None], listens: asyncio.Event) -> None:
        """Listen until the connection is lost. A connection may be dead without a word, so it is checked."""
        lost = asyncio.Event()
        conn = await asyncpg.connect(self._database.url, timeout=10)
        try:
            conn.add_termination_listener(lambda _: lost.set())
            with translated(self._database.where):
                await conn.add_listener(self._channel, lambda *_: wake())
            listens.set()
            # Notifications of the time without a listener are gone.
            wake()
            while not lost.is_set():
                try:
                    await asyncio.wait_for(lost.wait(), CHECK_SECONDS)
                except TimeoutError:
                    await conn.execute("SELECT 1", timeout=CHECK_SECONDS_MAX)
        finally:
            conn.terminate()


class Look(NamedTuple):
    """A position of the id sequence, and the transactions in progress: a snapshot taken just before."""

    position: int
    snapshot_xmax: int
    """Transactions with a lower id have ended, except those in `in_progress`."""
    in_progress: frozenset[int]
    next_xid: int
    """No transaction had this id, or a higher one, when the position was read."""

    @classmethod
    def parse(cls, text: str) -> Look:
        """Read the result of `sequence_look`.

        >>> Look.parse("17 100:104:100,102 2")
        Look(position=17, snapshot_xmax=104, in_progress=frozenset({100, 102}), next_xid=106)
        """
        position, snapshot, assigned = text.split()
        _, xmax, in_progress = snapshot.split(":")
        xids = frozenset(map(int, in_progress.split(","))) if in_progress else frozenset()
        return cls(int(position), int(xmax), xids, int(xmax) + int(assigned))


class InsertWatch:
    """Decides after each look whether events may have become visible since the last look.

    The sequence moves when an event is inserted, before its commit. Therefore the transactions that are open at a move
    are watched, and the end of each counts like a move. One move leads to a bounded number of positive answers.

    >>> watch = InsertWatch()
    >>> [watch.observe(Look.parse(text)) for text in ["1 9:9: 0", "1 9:9: 0", "1 9:9: 0"]]  # at rest
    [True, True, False]
    >>> [watch.observe(Look.parse(text)) for text in ["2 9:9: 1", "2 9:9: 1", "2 9:9: 1"]]  # an insert, by 9
    [True, True, False]
    >>> [watch.observe(Look.parse(text)) for text in ["2 10:10: 0", "2 10:10: 0"]]  # the commit of 9
    [True, False]
    """

    def __init__(self) -> None:
        self._position: int | None = None
        self._moved = False
        self._watched: frozenset[int] = frozenset()
        # Watched as well, and too new for a snapshot to tell apart: ids from here to `_until` were in use at the move.
        self._from = self._until = 0

    def observe(self, look: Look) -> bool:
        """Return whether the sequence has moved, or a watched transaction has ended."""
        moved = look.position != self._position
        # An insert draws its number shortly before its transaction has an id, so the look after a move counts as well.
        recent = moved or self._moved
        self._position, self._moved = look.position, moved
        known = range(self._from, min(self._until, look.snapshot_xmax))
        still = frozenset(xid for xid in look.in_progress if xid in known)
        ended = len(still) < len(known) or not self._watched <= look.in_progress
        if recent:
            self._watched, self._from, self._until = look.in_progress, look.snapshot_xmax, look.next_xid
        else:
            self._watched = (self._watched & look.in_progress) | still
            self._from = max(self._from, look.snapshot_xmax)
        return recent or ended


class SequenceWatcher:
    """Looks at the id sequence of the outbox many times a second, to notice inserts of any program.

    A look is one statement that reads a single row, takes no lock and writes nothing, and its cost does not depend on
    the rows of the outbox. It also works through a pooler.
    """

    def __init__(self, database: PostgresDatabase, sql: str, sequence: str) -> None:
        self._database, self._sql, self._sequence = database, sql, sequence

    @asynccontextmanager
    async def watching(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Call `wake` whenever events may have become visible, while the context is open."""
        task = asyncio.create_task(self._watch(wake), name="outrider-postgres-sequence")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self, wake: Callable[[], None]) -> None:
        watch, warned = InsertWatch(), False
        while True:
            pause = POOLED_LOOK_SECONDS if self._database.pooled else LOOK_SECONDS
            try:
                if watch.observe(await self._look()):
                    wake()
                warned = False
            except UsageError as error:
                # The relay polls, and another role or a grant may mend the cause at any time.
                pause = FORBIDDEN_SECONDS
                if not warned:
                    _log.warning(
                        "the relay cannot read the id sequence, and finds events of idle periods by polling only",
                        extra={"error": str(error), "remedy": f"GRANT SELECT ON SEQUENCE {self._sequence} TO its role"},
                    )
                warned = True
            except OutriderError:
                # Other statements of the relay report a database that is away.
                pause = AWAY_SECONDS
            await asyncio.sleep(pause)

    async def _look(self) -> Look:
        async with self._database.connection() as conn:
            if not self._database.pooled:
                return Look.parse(await conn.fetchval(self._sql, timeout=LOOK_SECONDS_MAX))
            # A pooler needs a statement in a single message. The driver sends queries in two, and a COPY in one.
            text = bytearray()

            async def collect(data: bytes) -> None:
                text.extend(data)

            await conn.copy_from_query(self._sql, output=collect, timeout=LOOK_SECONDS_MAX)
            return Look.parse(text.decode())
