"""A source whose deliveries a test writes, and a consumer with handlers that wait or fail as the test decides."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

from outrider.brokers.base import Revoked
from outrider.event import Delivery, Event
from outrider.inbox.consumer import Consumer
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.inbox.store import InboxStore
from outrider.retry import RetryPolicy
from outrider.stores.memory import MemoryInbox, MemoryStore
from outrider.testing import RecordingObserver

PATIENCE_SECONDS = 10.0
WAIT_SECONDS = 0.01


class Signal:
    """Wakes waiting tests each time something has happened."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def __call__(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, true: Callable[[], object]) -> None:
        """Return when it is so."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():
                self._waiting.append(future := asyncio.get_running_loop().create_future())
                await future


def delivery(name: str, *, partition: str = "s1", **headers: str) -> Delivery:
    """Make the delivery `key:number`."""
    key, _, number = name.partition(":")
    said = {"message_id": str(uuid4()), "event_type": "t", "key": key, "sequence": number, "gapless": "true", **headers}
    body = json.dumps({"name": name}).encode()
    return Delivery("orders", key.encode(), body, {k: v.encode() for k, v in said.items()}, partition, token=name)


class ScriptedSource:
    """Gives what a test has put in, in order. An error that was put in is raised when its turn comes."""

    def __init__(self, happened: Signal) -> None:
        self._happened = happened
        self._pending: list[Delivery | BaseException] = []
        self._came = asyncio.Event()
        self.start_errors: list[BaseException] = []
        self.revoked: Revoked | None = None
        self.on_ack: Callable[[str], None] = lambda name: None
        self.starts = self.closes = self.looks = 0
        self.given: list[str] = []
        self.acked: list[str] = []
        self.in_flight_most = 0

    def put(self, *items: Delivery | BaseException | str) -> None:
        """Let these come."""
        self._pending += [delivery(item) if isinstance(item, str) else item for item in items]
        self._came.set()

    async def start(self, revoked: Revoked) -> None:
        self.starts += 1
        self._happened()
        if self.start_errors:
            raise self.start_errors.pop(0)
        self.revoked = revoked

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        self.looks += 1
        self._happened()
        if self._pending and isinstance(error := self._pending[0], BaseException):
            self._pending.pop(0)
            raise error
        found: list[Delivery] = []
        for item in list(self._pending):
            if isinstance(item, BaseException) or len(found) == limit:
                break
            if item.partition not in paused:
                found.append(item)
                self._pending.remove(item)
        self.given += [str(item.token) for item in found]
        self.in_flight_most = max(self.in_flight_most, len(self.given) - len(self.acked))
        if not found:
            self._came.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._came.wait()
        return found

    def ack(self, delivery: Delivery) -> None:
        self.on_ack(delivery.token)
        self.acked.append(delivery.token)
        self._happened()

    async def close(self) -> None:
        self.closes += 1
        self._happened()


class Rig:
    """A consumer at work over a scripted source and a store in memory."""

    def __init__(self, store: InboxStore | None = None, **settings: Any) -> None:
        self.happened = Signal()
        self.until = self.happened.until
        self.source, self.observer = ScriptedSource(self.happened), RecordingObserver()
        self.store = store or MemoryInbox(MemoryStore())
        self.begun: list[str] = []
        self.effects: list[str] = []
        self.under_way: Counter[str] = Counter()
        self.failing: dict[str, list[BaseException]] = defaultdict(list)
        self._held_until: dict[str, asyncio.Event] = {}
        plain = {"retry": RetryPolicy(base_seconds=0.001, cap_seconds=0.001, jitter=0, max_attempts=3)}
        routes = Routes("billing", ConsumerSettings(**{**plain, **settings}), {("orders", "t"): Route(self.handle)})
        self.consumer = Consumer(self.source, self.store, routes, observer=self.observer)

    def hold(self, *names: str) -> None:
        """Let the handler wait in these, until they are let go."""
        self._held_until |= {name: asyncio.Event() for name in names}

    def let_go(self, *names: str) -> None:
        """Let the handler go on."""
        for name in names or list(self._held_until):
            self._held_until[name].set()

    async def handle(self, event: Event, tx: Any) -> None:
        """Write the event's name as the effect; wait or fail first, as the test decides."""
        name = event.payload["name"]
        self.begun.append(name)
        self.under_way[str(event.key)] += 1
        self.happened()
        try:
            if held_until := self._held_until.get(name):
                await held_until.wait()
            if errors := self.failing[name]:
                raise errors.pop(0)
            tx.on_commit.append(lambda: self.effects.append(name))
        finally:
            self.under_way[str(event.key)] -= 1


@asynccontextmanager
async def running(store: InboxStore | None = None, **settings: Any) -> AsyncIterator[Rig]:
    """Run a consumer; stop it at the end."""
    rig = Rig(store, **settings)
    task = asyncio.create_task(rig.consumer.run())
    try:
        yield rig
    finally:
        rig.consumer.stop()
        rig.let_go()
        await task
