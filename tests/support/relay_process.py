"""Real relay processes that a test can stop, continue and kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.brokers.embedded import EmbeddedBroker
from outrider.event import Message

PATIENCE_SECONDS = 60.0
QUICK = ("--lease-seconds", "2", "--publish-timeout-seconds", "0.8")
"""A lease that ends soon, for tests that wait for its end."""


class RelayProcess:
    """`outrider relay` as an operating system process. Its output goes to `relays.log` in a folder."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, store: str, broker: str, folder: Path, *options: str) -> RelayProcess:
        urls = ["--store", store, "--broker", broker, "--parent", str(os.getpid())]
        command = [sys.executable, "-m", "outrider", "relay", *urls, "--json", *options]
        with (folder / "relays.log").open("ab") as log_file:
            return cls(await asyncio.create_subprocess_exec(*command, stdout=log_file, stderr=log_file))

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        self._process.terminate()
        return await asyncio.wait_for(self._process.wait(), PATIENCE_SECONDS)

    @property
    def running(self) -> bool:
        return self._process.returncode is None


@asynccontextmanager
async def relays(store: str, broker: str, folder: Path, count: int, *options: str) -> AsyncIterator[list[RelayProcess]]:
    """Run relays; whatever is left of them at the end is killed."""
    crew = [await RelayProcess.start(store, broker, folder, *options) for _ in range(count)]
    try:
        yield crew
    except BaseException:
        print((folder / "relays.log").read_text())
        raise
    finally:
        for relay in crew:
            if relay.running:
                relay.resume()
                await relay.kill()


def at(log: Path) -> str:
    """Return the URL of an embedded broker."""
    return f"embedded:///{log}"


async def until(what: str, conn: Any, sql: str, *args: Any) -> None:
    """Wait until a query says so: asking again is all one can do about another process."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await conn.fetchval(sql, *args):
                await conn.execute("SELECT pg_sleep(0.02)")
    except TimeoutError:
        raise AssertionError(f"after {PATIENCE_SECONDS:g} s still waiting for: {what}") from None


async def everything(*logs: Path) -> list[Message]:
    """Read whole logs, as one, by the time of publishing."""
    deliveries = []
    for log in logs:
        broker = EmbeddedBroker(log)
        await broker.start()
        deliveries += await broker.read("test", None, 1_000_000)
        await broker.close()
    return [delivery.message for delivery in sorted(deliveries, key=lambda delivery: delivery.published_at)]


def first_deliveries(messages: list[Message]) -> dict[str, list[int]]:
    """Return the sequence numbers per key, duplicates removed, in the order in which they came."""
    seen: set[str] = set()
    order: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        if message.message_id not in seen:
            seen.add(message.message_id)
            order[message.key].append(int(message.headers["sequence"]))
    return order
