"""Real consumer processes that a test can stop and kill, and what must hold of their effects when all is done."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import outrider
from outrider import Event, Relay
from outrider.brokers.base import Broker
from outrider.outbox.settings import RelaySettings
from outrider.stores.postgres import PostgresStore
from tests.support.crashing_consumer import NEVER, TYPE
from tests.support.relay_process import PATIENCE_SECONDS

POLL_SECONDS = 0.05
ROOT = Path(__file__).parents[2]
EFFECTS = "SELECT key, array_agg(sequence ORDER BY id) FROM effects GROUP BY key"
EMPTY = "SELECT count(*) = 0 FROM outrider.outbox"


@dataclass(frozen=True, slots=True)
class Work:
    """The work of consumers, and its settings. Their output goes to `consumers.log` in the folder."""

    store: str
    broker: str
    topic: str
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)

    async def start(self, point: str = NEVER, count: int = 0) -> ConsumerProcess:
        """Start a process, which may have to die at a point."""
        facts = [str(os.getpid()), self.store, self.broker, self.topic, point, str(count), json.dumps(self.settings)]
        command = [sys.executable, "-m", "tests.support.crashing_consumer", *facts]
        with (self.folder / "consumers.log").open("ab") as log_file:
            return ConsumerProcess(
                await asyncio.create_subprocess_exec(*command, stdout=log_file, stderr=log_file, cwd=ROOT)
            )

    async def until_started(self, count: int) -> None:
        """Wait until so many processes have said that they have started."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + PATIENCE_SECONDS
        while (self.folder / "consumers.log").read_text().count('"message": "consumer started"') < count:
            assert clock.time() < deadline, f"after {PATIENCE_SECONDS:g} s not all of {count} consumers have started"
            await asyncio.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def running(self, point: str = NEVER, count: int = 0) -> AsyncIterator[ConsumerProcess]:
        """Run a process around the block; whatever is left of it at the end is killed."""
        process = await self.start(point, count)
        try:
            yield process
        except BaseException:
            print((self.folder / "consumers.log").read_text())
            raise
        finally:
            await process.kill()


@dataclass(frozen=True, slots=True)
class ConsumerProcess:
    """A consumer as an operating system process."""

    process: asyncio.subprocess.Process

    async def end(self) -> int:
        """Wait for its end; return how it ended."""
        return await asyncio.wait_for(self.process.wait(), PATIENCE_SECONDS)

    async def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def stop(self) -> int:
        """Ask for a clean stop; return how it ended."""
        self.process.terminate()
        return await self.end()


async def stage(conn: Any, topic: str, keys: Iterable[str], rounds: int) -> list[UUID]:
    """Stage so many numbered events of each key, the keys in turn."""
    names = sorted(keys)
    staged: list[UUID] = []
    async with conn.transaction():
        for _ in range(rounds):
            events = [Event(TYPE, {"key": key}, topic=topic, key=key, sequence="auto") for key in names]
            staged += await outrider.stage(conn, *events)
    return staged


@asynccontextmanager
async def relaying(url: str, broker: Broker, **settings: Any) -> AsyncIterator[PostgresStore]:
    """Run a relay around the block."""
    store = await PostgresStore.open(url)
    relay = Relay(store, broker, RelaySettings(**settings))
    running = asyncio.create_task(relay.run())
    try:
        yield store
    finally:
        relay.stop()
        await running
        await broker.close()
        await store.close()


async def exactly_once_in_order(conn: Any, staged: list[UUID], per_key: dict[str, int]) -> None:
    """Every event has its effect, none has two, and those of a key are in the order of its events."""
    effects = [row["event_id"] for row in await conn.fetch("SELECT event_id FROM effects")]
    assert len(effects) == len(set(effects))
    assert set(effects) == set(staged)
    assert dict(await conn.fetch(EFFECTS)) == {key: list(range(1, count + 1)) for key, count in per_key.items()}
    leftovers = "SELECT (SELECT count(*) FROM outrider.inbox_dead_letter), (SELECT count(*) FROM outrider.inbox_held)"
    assert tuple(await conn.fetchrow(leftovers)) == (0, 0)
