"""What the inbox contract suite needs around a store: handlers with effects that can be counted, and deliveries."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from outrider.backoff import RetryPolicy
from outrider.codec.open import open_delivery
from outrider.delivery import Delivery
from outrider.event import SKIPPED_TYPE, Event
from outrider.inbox.handling import Handling
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.inbox.upkeep import Upkeep
from outrider.inbox_store import InboxStore
from outrider.testing.clock import ManualClock
from outrider.testing.observer import Notebook

TOPIC = "orders"
TYPE = "order.placed"


def delivery(
    number: int | None = None, *, key: str = "A-1", event_id: UUID | None = None, place: str = "", **headers: str
) -> Delivery:
    """Make a delivery as the relay would have published it: numbered by us, if it has a number.

    >>> delivery(3).headers["sequence"]
    b'3'
    """
    said = {"message_id": str(event_id or uuid4()), "event_type": TYPE, "key": key, **headers}
    if number is not None:
        said |= {"sequence": str(number), "gapless": headers.get("gapless", "true")}
    body = json.dumps({"number": number}).encode()
    return Delivery(TOPIC, key.encode(), body, {k: v.encode() for k, v in said.items()}, place=place)


def marker(number: int, *, key: str = "A-1") -> Delivery:
    """Make the marker that is published in the place of a skipped event."""
    return delivery(number, key=key, event_type=SKIPPED_TYPE, skipped=str(uuid4()), gapless="")


class InboxBench(ABC):
    """An inbox store under test. Third parties implement the abstract methods and subclass `InboxContract`.

    `concurrent` says whether two transactions can be open for writing at once.
    """

    concurrent = True

    def __init__(self, store: InboxStore, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.notebook = Notebook()
        self.failing: dict[str, list[BaseException]] = {}

    @abstractmethod
    async def effect(self, tx: Any, text: str) -> None:
        """Write an effect in the transaction."""

    @abstractmethod
    async def effects(self) -> list[str]:
        """Return the effects that were committed, in order."""

    @abstractmethod
    async def end(self, tx: Any, *, commit: bool) -> None:
        """End the transaction, as no handler should."""

    @abstractmethod
    async def staged(self) -> int:
        """Return how many events are staged in the outbox beside the inbox."""

    async def advance(self, *, seconds: float) -> None:
        """Let time pass, for the database too."""
        self.clock.advance(seconds=seconds)

    async def handler(self, event: Event, tx: Any) -> None:
        """Write `key:sequence` as the effect; fail first, as often as told."""
        name = f"{event.key}:{event.sequence}"
        await self.effect(tx, name)
        if errors := self.failing.get(name):
            raise errors.pop(0)

    def fail(self, name: str, *errors: BaseException) -> None:
        """Let the handler raise these in turn when it meets the event."""
        self.failing[name] = list(errors)

    def routes(self, consumer: str = "billing", **settings: Any) -> Routes:
        """Make the routes of a consumer with the test's handler."""
        plain = {"retry": RetryPolicy(base_seconds=0.01, cap_seconds=0.01, jitter=0, max_attempts=3)}
        return Routes(consumer, ConsumerSettings(**{**plain, **settings}), {(TOPIC, TYPE): Route(self.handler)})

    def consumer(self, consumer: str = "billing", **settings: Any) -> Hand:
        """Make a consumer that a test drives by hand."""
        return Hand(self, self.routes(consumer, **settings))


class Hand:
    """A consumer without a source: the test delivers."""

    def __init__(self, bench: InboxBench, routes: Routes) -> None:
        self._bench = bench
        self.routes = routes
        self.handling = Handling(bench.store, routes, bench.notebook, random.Random(0))
        self._upkeep = Upkeep(bench.store, routes, self.handling, bench.notebook)

    async def deliver(self, *deliveries: Delivery) -> int:
        """Handle deliveries together; return how many may be acked."""
        tried = await self.handling.handle([open_delivery(delivery) for delivery in deliveries])
        return len(tried.done)

    async def deliver_all(self, deliveries: Sequence[Delivery], *, times: int = 20) -> None:
        """Deliver one after another, each until it may be acked; then let everything drain."""
        for one in deliveries:
            for _ in range(times):
                if await self.deliver(one):
                    break
            else:
                raise AssertionError(f"{one} was not done with after {times} attempts")
            await self.drain()

    async def drain(self) -> None:
        """Let drains run to their end, and those that another process left behind."""
        await self.handling.drained()
        await self._upkeep.tend()
        await self.handling.drained()

    async def tend(self) -> None:
        """Do the duties once."""
        await self._upkeep.tend()
