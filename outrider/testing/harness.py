"""What a contract suite needs around a store: its transactions, its time, and relays that a test drives by hand."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar
from uuid import UUID

import outrider
from outrider.backoff import RetryPolicy
from outrider.broker import Broker
from outrider.event import Event
from outrider.outbox.optimistic import OptimisticWriter
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.store import Store
from outrider.testing.clock import ManualClock
from outrider.testing.observer import Notebook

PASSES_MAX = 10_000

T = TypeVar("T")


class Harness(ABC):
    """A store under test. Third parties implement the abstract methods and subclass `StoreContract`.

    `concurrent` says whether two transactions can be open for writing at once, `savepoints` whether a part of one can
    be rolled back.
    """

    store: Store
    concurrent = True
    savepoints = True

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.notebook = Notebook()

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a business transaction; its value is what `outrider.stage` takes."""

    @abstractmethod
    def savepoint(self, conn: Any) -> AbstractAsyncContextManager[Any]:
        """Open a savepoint in a transaction; it rolls back when the block raises."""

    async def transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run work in a transaction of its own, as often as the database asks for that."""
        async with self.transaction() as conn:
            return await work(conn)

    async def advance(self, *, seconds: float) -> None:
        """Let time pass, for the database too."""
        self.clock.advance(seconds=seconds)

    async def stage(self, *events: Event) -> list[UUID]:
        """Stage events in a transaction of their own."""
        return await self.transact(lambda conn: outrider.stage(conn, *events))

    def relay(self, broker: Broker, *, seed: int = 0, **settings: Any) -> Relay:
        """Make a relay that a test drives step by step. Retries have no jitter, so that their times are known."""
        plain = {"workers": 1, "retry": RetryPolicy(jitter=0, max_attempts=3)}
        made = RelaySettings(**{**plain, **settings})
        chance = random.Random(seed)
        return Relay(self.store, broker, made, clock=self.clock, observer=self.notebook, chance=chance)

    def writer(self, broker: Broker, **options: Any) -> OptimisticWriter:
        """Make an optimistic writer."""
        place = outrider.Outbox().place
        return OptimisticWriter(self.store, broker, place, clock=self.clock, observer=self.notebook, **options)

    async def works(self, *relays: Relay) -> int:
        """Let relays pass in turn until none has anything to do now; return how many passes moved something."""
        for passes in range(PASSES_MAX):
            for relay in relays:
                await relay.keep()
            if not any([await relay.work() for relay in relays]):
                return passes
        raise AssertionError(f"still busy after {PASSES_MAX} passes")

    async def works_for(self, relay: Relay, *, seconds: float, step_seconds: float = 10.0) -> None:
        """Let a relay work, probe and keep its lanes while time passes."""
        for _ in range(int(seconds / step_seconds)):
            await self.advance(seconds=step_seconds)
            await relay.probe()
            await self.works(relay)


def order(number: int, key: str = "A", **fields: Any) -> Event:
    """Make an event whose payload says its place in its stream."""
    return Event("order.changed", {"n": number}, **{"aggregate_type": "order", "aggregate_id": key, **fields})


def orders(count: int, key: str = "A", **fields: Any) -> list[Event]:
    """Make a run of events of one stream."""
    return [order(number, key, **fields) for number in range(1, count + 1)]


def numbers(messages: list[Any], key: str = "A") -> list[int]:
    """Return which events of a key were delivered, first deliveries only, in order."""
    found = [json.loads(message.body)["n"] for message in messages if message.key == key and message.body != b"null"]
    return list(dict.fromkeys(found))
