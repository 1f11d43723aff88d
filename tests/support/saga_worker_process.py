"""Saga workers as processes that a test can stop and kill, beside a relay and the service that answers them.

Processes are forked from one that has imported everything, so that hundreds of them cost no more than what they do.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from outrider import app
from outrider.brokers.base import CONFIRMED, Broker, PublishResult
from outrider.event import Message
from outrider.inbox.consumer import Consumer
from tests.support import crashing_saga_worker
from tests.support.consumer_process import relaying
from tests.support.crashing_consumer import NEVER
from tests.support.crashing_saga_worker import COMMIT_SENT, COMMITTED, run_once
from tests.support.relay_process import PATIENCE_SECONDS, until
from tests.support.saga_ledger import ENDED, Order, order_saga, stock_inbox

FORKING = multiprocessing.get_context("forkserver")
VERSION = "SELECT version FROM outrider.saga_instance WHERE saga_id = $1::text::uuid"


@dataclass(frozen=True, slots=True)
class Shop:
    """The URLs and the folder. The output of workers goes to `workers.log` in the folder."""

    store: str
    broker: str
    folder: Path

    @property
    def note(self) -> Path:
        """Where a worker says at whose turn it dies."""
        return self.folder / "died.json"

    @asynccontextmanager
    async def working(self, point: str = NEVER, count: int = 0) -> AsyncIterator[BaseProcess]:
        """Run a worker around the block; whatever is left of it at the end is killed."""
        FORKING.set_forkserver_preload([crashing_saga_worker.__name__])
        log = self.folder / "workers.log"
        task = (log, self.store, self.broker, point, count, self.note)
        worker = FORKING.Process(target=run_once, args=task, daemon=True)
        worker.start()
        try:
            yield worker
        except BaseException:
            print(log.read_text()[-20_000:])
            raise
        finally:
            worker.kill()
            await end(worker)

    async def crash(self, conn: Any, point: str, count: int) -> None:
        """Let a worker die at a point, and see that a turn which it died at was committed, or was not."""
        self.note.unlink(missing_ok=True)
        async with self.working(point, count) as worker:
            assert await end(worker) == -signal.SIGKILL, f"the worker did not die at {point}, pass {count}"
        if not self.note.exists():
            return
        died = json.loads(self.note.read_text())
        if point.endswith((COMMIT_SENT, COMMITTED)):
            # The answer may not be read, but the server has read the commit.
            await until(
                "the commit to be heard", conn, f"SELECT ({VERSION}) = $2", died["saga_id"], died["version"] + 1
            )
        else:
            assert await conn.fetchval(VERSION, died["saga_id"]) == died["version"]

    @asynccontextmanager
    async def services(self, lost: Lost | None = None) -> AsyncIterator[None]:
        """Run the relay and the stock around the block, with a broker between them that loses the chosen messages."""
        [routes] = stock_inbox().consumers.values()
        inbox, broker = await app.open_inbox(self.store), await app.open_broker(self.broker)
        stock = Consumer(app.open_source(self.broker, routes), inbox, routes)
        async with relaying(self.store, LosingBroker(broker, lost) if lost else broker, workers=1):
            running = asyncio.create_task(stock.run())
            try:
                yield
            finally:
                stock.stop()
                await running
                await inbox.close()


Lost = Callable[[Message], bool]


Publish = Callable[[Sequence[Message]], Awaitable[Sequence[PublishResult]]]


class LosingBroker:
    """A broker that breaks its word: some of what it confirms is gone."""

    def __init__(self, broker: Broker, lost: Lost) -> None:
        self._broker, self._lost = broker, lost
        self.capabilities = broker.capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish what is not lost, and confirm all the same."""
        return await self._publish(messages, self._broker.publish)

    async def publish_promptly(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish as a relay does."""
        return await self._publish(messages, getattr(self._broker, "publish_promptly", self._broker.publish))

    async def publish_apart(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish as a relay does to a destination that may not work."""
        return await self._publish(messages, getattr(self._broker, "publish_apart", self._broker.publish))

    async def _publish(self, messages: Sequence[Message], publish: Publish) -> Sequence[PublishResult]:
        kept = [message for message in messages if not self._lost(message)]
        results = iter(await publish(kept) if kept else ())
        return [next(results) if message in kept else CONFIRMED for message in messages]


async def all_ended(conn: Any, count: int, *, seconds_max: float = PATIENCE_SECONDS) -> None:
    """Wait until so many sagas have ended: asking again is all one can do about other processes."""
    deadline = asyncio.get_running_loop().time() + seconds_max
    while (ended := await conn.fetchval(ENDED)) < count:
        assert asyncio.get_running_loop().time() < deadline, f"after {seconds_max:g} s {ended} of {count} have ended"
        await conn.execute("SELECT pg_sleep(0.1)")


async def end(worker: BaseProcess) -> int | None:
    """Wait for the end of a worker; return how it ended, or None if it does not."""
    await asyncio.to_thread(worker.join, PATIENCE_SECONDS)
    return worker.exitcode


class Orders:
    """Places orders, and knows which."""

    def __init__(self, rng: random.Random) -> None:
        self._chance = rng
        self._saga = order_saga(_nobody, _nothing, call_seconds=1, reply_seconds=1)
        self.ids: set[str] = set()

    async def place(self, conn: Any, kinds: Iterable[str]) -> None:
        """StepKey one order of each kind given, in any order."""
        chosen = list(kinds)
        self._chance.shuffle(chosen)
        async with conn.transaction():
            for kind in chosen:
                order_id = f"{kind}-{len(self.ids):04}"
                self.ids.add(order_id)
                await self._saga.start(conn, Order(order_id), correlation_id=order_id)


async def _nobody() -> Any:
    raise AssertionError("who only places orders runs none")


async def _nothing(name: str, run: Any) -> None:
    raise AssertionError("who only places orders runs none")
