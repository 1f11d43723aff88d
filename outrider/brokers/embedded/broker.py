"""The embedded broker: publishing to the log, and reading from it.

A batch is one transaction, so its messages are confirmed together or nothing is known of any. Any number of processes
may publish and read. Old entries are removed on the way, a bounded number at a time.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from outrider.broker import Traits
from outrider.brokers.embedded import log
from outrider.brokers.embedded.examine import examine
from outrider.brokers.embedded.log import Entry
from outrider.errors import Transient, Unreachable
from outrider.event import Message
from outrider.finding import Finding
from outrider.outcome import CONFIRMED, Refused, Rejected, Unresolved, Verdict

PRUNE_SECONDS = 60.0
TAIL_SECONDS = 0.05
TAIL_MAX = 500

P = ParamSpec("P")
T = TypeVar("T")


class EmbeddedBroker:
    """A broker in a SQLite file, which it makes when it is first used."""

    traits = Traits(ordered=True)

    def __init__(self, path: str | Path, *, retention_days: float = 7) -> None:
        self._path = Path(path)
        self._retention_seconds = retention_days * 86_400
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._prune_at = 0.0

    async def start(self) -> None:
        """Open the log, or make it."""
        try:
            await self._run(lambda conn: None)
        except sqlite3.Error as error:
            raise Unreachable(f"the log {self._path} cannot be opened ({error}); check path and permissions") from error

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Append a batch in one transaction."""
        verdicts = judge(messages, self.traits.message_bytes_max)
        taken = [message for message, verdict in zip(messages, verdicts, strict=True) if verdict is CONFIRMED]
        try:
            await self._run(self._append, taken)
        except sqlite3.Error as error:
            unknown = Unresolved(f"the log could not be written: {error}")
            return [unknown if verdict is CONFIRMED else verdict for verdict in verdicts]
        return verdicts

    async def probe(self, destination: str) -> None:
        """Write to the log's file without leaving an entry."""
        try:
            await self._run(log.probe, time.time())
        except sqlite3.Error as error:
            raise Transient(f"the log {self._path} cannot be written ({error}); check free space and locks") from error

    async def examine(self, topics: Sequence[str]) -> list[Finding]:
        """Look at the file, without making it; a topic needs no preparation."""
        trouble = ""
        if self._path.exists():
            try:
                await self.probe("")
            except Transient as error:
                trouble = str(error)
        return examine(self._path, trouble)

    async def retention_days(self, topics: Sequence[str]) -> dict[str, float]:
        """Return how long entries are kept, the same for every topic."""
        return dict.fromkeys(topics, self._retention_seconds / 86_400)

    def destination(self, message: Message) -> str:
        """Only the file as a whole can be down."""
        return ""

    async def read(self, consumer: str, topics: Sequence[str] | None, limit: int) -> list[Entry]:
        """Return what the consumer has not committed yet, of these topics or of all, in the order of the log."""
        return await self._ask(log.read, consumer, topics, limit)

    async def places(self, consumer: str, topics: Sequence[str] | None) -> dict[str, int]:
        """Return the last offset that the consumer has committed, by topic."""
        return await self._ask(log.places, consumer, topics)

    async def behind(self, places: Mapping[str, int], limit: int) -> list[Entry]:
        """Return what is behind these places, in the order of the log."""
        return await self._ask(log.behind, places, limit)

    async def commit(self, consumer: str, offset: int, topics: Sequence[str] | None = None) -> None:
        """Note that the consumer is done up to and including the offset, in these topics or in all it has read."""
        await self._ask(log.commit, consumer, offset, topics)

    async def tail(self, from_offset: int = 0, topics: Sequence[str] | None = None) -> AsyncGenerator[Entry, None]:
        """Yield entries from an offset on, then new ones as they come, without end and without a consumer."""
        while True:
            found = await self._ask(log.after, topics, from_offset - 1, TAIL_MAX)
            for entry in found:
                yield entry
                from_offset = entry.offset + 1
            if not found:
                await asyncio.sleep(TAIL_SECONDS)

    async def topics(self) -> list[str]:
        """List the topics that have entries."""
        return await self._ask(log.topics)

    async def close(self) -> None:
        """Close the file and end the thread; using the broker again opens it again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _ask(self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the work for a consumer, who must hear of trouble."""
        try:
            return await self._run(work, *args, **kwargs)
        except sqlite3.Error as error:
            raise Transient(f"the log {self._path} cannot be read ({error}); try again, or check the file") from error

    async def _run(self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-log")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(self._open(), *args, **kwargs))

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = log.connect(self._path)
        return self._connection

    def _append(self, conn: sqlite3.Connection, messages: Sequence[Message]) -> None:
        now = time.time()
        if messages:
            log.append(conn, messages, now)
        # The batch is safe by now, so trouble with old entries is no trouble of its messages.
        with suppress(sqlite3.Error):
            self._prune(conn, now)

    def _prune(self, conn: sqlite3.Connection, now: float) -> None:
        """Look for old entries once a minute; while there are many, remove some with every batch."""
        if time.monotonic() < self._prune_at:
            return
        full = log.prune(conn, now - self._retention_seconds) == log.PRUNE_MAX
        self._prune_at = time.monotonic() + (0.0 if full else PRUNE_SECONDS)


def judge(messages: Sequence[Message], bytes_max: int) -> list[Verdict]:
    """Say which messages may be appended: none that is too large, and none behind one in its stream.

    >>> message = Message("1", "orders", "A", None, b"12345", {})
    >>> [type(verdict).__name__ for verdict in judge([message, message._replace(body=b"1")], bytes_max=4)]
    ['Rejected', 'Refused']
    """
    verdicts: list[Verdict] = []
    broken: set[tuple[str, str]] = set()
    for message in messages:
        stream = (message.topic, message.key)
        if stream in broken:
            verdicts.append(Refused("an earlier message of its stream was rejected"))
        elif len(message.body) > bytes_max:
            broken.add(stream)
            verdicts.append(Rejected(f"{len(message.body)} bytes are more than the log takes ({bytes_max})"))
        else:
            verdicts.append(CONFIRMED)
    return verdicts
