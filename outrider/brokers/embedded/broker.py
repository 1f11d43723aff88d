"""The embedded broker: publishes to the log and reads from the log.

A batch is one transaction: the messages are confirmed together, or all results are unknown. Any number of processes may
publish and read. Old entries are removed along with the publishing, a bounded number at a time.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from outrider.brokers.base import CONFIRMED, Capabilities, Nacked, PublishResult, Rejected, Unknown
from outrider.brokers.embedded import log
from outrider.brokers.embedded.log import LogEntry, Marked
from outrider.checks import CheckResult, fail, ok, remote_filesystem
from outrider.errors import Transient, Unreachable
from outrider.event import Message

PRUNE_SECONDS = 60.0

TAIL_SECONDS = 0.05

TAIL_MAX = 500

P = ParamSpec("P")

T = TypeVar("T")

CHECKS = {
    "embedded-writable": "the log can be written",
    "embedded-filesystem": "the log is on a disk of this machine",
}


class EmbeddedBroker:
    """A broker in a SQLite file. The file is created on first use."""

    capabilities = Capabilities(ordered=True)

    def __init__(self, path: str | Path, *, retention_days: float = 7) -> None:
        self._path = Path(path)
        self._retention_seconds = retention_days * 86_400
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._prune_at = 0.0

    async def start(self) -> None:
        """Open the log; create the file if missing."""
        try:
            await self._run(lambda conn: None)
        except sqlite3.Error as error:
            raise Unreachable(f"the log {self._path} cannot be opened ({error}); check path and permissions") from error

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Append a batch in one transaction."""
        results = check_sizes(messages, self.capabilities.message_bytes_max)
        accepted = [message for message, result in zip(messages, results, strict=True) if result is CONFIRMED]
        try:
            await self._run(self._append, accepted)
        except sqlite3.Error as error:
            unknown = Unknown(f"the log could not be written: {error}")
            return [unknown if result is CONFIRMED else result for result in results]
        return results

    async def probe(self, destination: str) -> None:
        """Write to the log's file without leaving an entry."""
        try:
            await self._run(log.probe, time.time())
        except sqlite3.Error as error:
            raise Transient(f"the log {self._path} cannot be written ({error}); check free space and locks") from error

    async def check(self, topics: Sequence[str]) -> list[CheckResult]:
        """Check the file without creating it; a topic needs no preparation."""
        error_text = ""
        if self._path.exists():
            try:
                await self.probe("")
            except Transient as error:
                error_text = str(error)
        return check(self._path, error_text)

    async def retention_days(self, topics: Sequence[str]) -> dict[str, float]:
        """Return the retention in days, which is the same for every topic."""
        return dict.fromkeys(topics, self._retention_seconds / 86_400)

    def destination(self, message: Message) -> str:
        """Return the empty name: only the file as a whole can fail."""
        return ""

    async def read(self, consumer: str, topics: Sequence[str] | None, limit: int) -> list[LogEntry]:
        """Return the entries that the consumer has not committed yet, of the given topics or of all, in log order."""
        return await self._read(log.read, consumer, topics, limit)

    async def positions(self, consumer: str, topics: Sequence[str] | None) -> dict[str, int]:
        """Return the last offset that the consumer has committed, by topic."""
        return await self._read(log.positions, consumer, topics)

    async def after_positions(self, positions: Mapping[str, int], limit: int) -> list[LogEntry]:
        """Return the entries after the given positions, in log order."""
        return await self._read(log.after_positions, positions, limit)

    async def commit(self, consumer: str, offset: int, topics: Sequence[str] | None = None) -> None:
        """Commit the consumer's position up to and including the offset, in the given topics or in all topics read."""
        await self._read(log.commit, consumer, offset, topics)

    async def subjects(self, subjects: Collection[str]) -> AsyncGenerator[list[Marked], None]:
        """Yield the messages of subjects, a part of the log at a time."""
        after: int | None = 0
        while after is not None:
            found, after = await self._read(log.of_subjects, subjects, after)
            yield found

    async def erase(self, messages: Sequence[Marked], body: bytes) -> None:
        """Replace the headers and the bodies of messages."""
        await self._read(log.erase, messages, body)

    async def tail(self, from_offset: int = 0, topics: Sequence[str] | None = None) -> AsyncGenerator[LogEntry, None]:
        """Yield entries from an offset on, then new entries as they are appended, without end. Needs no consumer."""
        while True:
            found = await self._read(log.after, topics, from_offset - 1, TAIL_MAX)
            for entry in found:
                yield entry
                from_offset = entry.offset + 1
            if not found:
                await asyncio.sleep(TAIL_SECONDS)

    async def topics(self) -> list[str]:
        """List the topics that have entries."""
        return await self._read(log.topics)

    async def close(self) -> None:
        """Close the file and end the thread; the next use opens the file again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _read(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run work for a consumer; errors are raised to the caller."""
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
        # The batch is committed by now, so an error while pruning does not affect the results of its messages.
        with suppress(sqlite3.Error):
            self._prune(conn, now)

    def _prune(self, conn: sqlite3.Connection, now: float) -> None:
        """Look for old entries once a minute; while there are many, remove some with every batch."""
        if time.monotonic() < self._prune_at:
            return
        full = log.prune(conn, now - self._retention_seconds) == log.PRUNE_MAX
        self._prune_at = time.monotonic() + (0.0 if full else PRUNE_SECONDS)


def check_sizes(messages: Sequence[Message], bytes_max: int) -> list[PublishResult]:
    """Return a publish result per message. After a message that is too large, later messages of its stream are nacked.

    >>> message = Message("1", "orders", "A", None, b"12345", {})
    >>> [type(result).__name__ for result in check_sizes([message, message._replace(body=b"1")], bytes_max=4)]
    ['Rejected', 'Nacked']
    """
    results: list[PublishResult] = []
    broken: set[tuple[str, str]] = set()
    for message in messages:
        stream = (message.topic, message.key)
        if stream in broken:
            results.append(Nacked("an earlier message of its stream was rejected"))
        elif len(message.body) > bytes_max:
            broken.add(stream)
            results.append(Rejected(f"{len(message.body)} bytes are more than the log takes ({bytes_max})"))
        else:
            results.append(CONFIRMED)
    return results


def check(path: Path, error_text: str) -> list[CheckResult]:
    """Return the check results for the log file: its filesystem, and the error text of a test write."""
    writable = os.access(path.absolute().parent, os.W_OK, effective_ids=True)
    found = check_writable(path, error_text) if path.exists() else check_creatable(path, writable)
    return [found, check_filesystem(remote_filesystem(path))]


def check_writable(path: Path, error_text: str) -> CheckResult:
    """Return whether the log accepts messages, as a check result.

    >>> check_writable(Path("log.db"), "").text
    'log.db takes entries'
    """
    if not error_text:
        return ok("embedded-writable", f"{path} takes entries")
    return fail("embedded-writable", error_text, "check path, rights, free space and locks")


def check_creatable(path: Path, writable: bool) -> CheckResult:
    """Return whether the missing log file can be created, as a check result.

    >>> check_creatable(Path("log.db"), True).text
    'log.db is not there yet; it is made when first used'
    """
    if writable:
        return ok("embedded-writable", f"{path} is not there yet; it is made when first used")
    text = f"{path} is not there, and its directory cannot be written"
    return fail("embedded-writable", text, "make the directory, and give the relay's user the right to write there")


def check_filesystem(remote: str | None) -> CheckResult:
    """Return whether the filesystem of the file is suitable, as a check result.

    >>> check_filesystem("nfs4").level
    <Level.ERROR: 'error'>
    """
    if remote is None:
        return ok("embedded-filesystem", "local")
    text = f"the log is on {remote}: SQLite's locks and its write-ahead log need a disk of this machine"
    return fail("embedded-filesystem", text, "move the log to a local disk")
