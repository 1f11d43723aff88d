"""The network between a relay and its servers: slow, and sometimes silent.

A request is on its way for a while, takes effect, and its answer is on its way for a while. The sender may be frozen or
dead by the time either happens. A lost request does nothing; a lost answer leaves the sender not knowing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from uuid import UUID

from outrider.checks import CheckResult
from outrider.errors import Unreachable
from outrider.event import OutboxRow, Stream
from outrider.outbox.model import Due, Fetched, HeartbeatResult, Lease, OptimisticClaim, Settlements
from outrider.stores.memory import MemoryStore
from tests.simulation.record import Record
from tests.simulation.virtual import VirtualLoop, as_actor

T = TypeVar("T")


class Trace(Protocol):
    """The trace in which a wire notes each request."""

    def note(self, actor: str, verb: str, ids: Sequence[object] = ()) -> None:
        """Add a line."""


@dataclass(slots=True)
class Weather:
    """The probability of each kind of failure, per request."""

    slow: float = 0.0
    stalled: float = 0.0
    stall_seconds: float = 10.0
    lost: float = 0.0
    swoon: float = 0.0

    def clear_up(self) -> None:
        self.slow = self.stalled = self.lost = self.swoon = 0.0


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """Run a verb of the memory store: it never pauses."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    call.close()
    raise AssertionError("a verb of the memory store paused, so it is not atomic")


class Wire:
    """One actor's line to its servers."""

    def __init__(self, loop: VirtualLoop, actor: str, rng: random.Random, weather: Weather, record: Trace) -> None:
        self._loop, self._actor, self._chance, self._weather, self._record = loop, actor, rng, weather, record
        self._nobody = as_actor("")

    async def carry(self, verb: str, ids: Callable[[], tuple[object, ...]], act: Callable[[], T]) -> T:
        """Send a request and wait for its answer."""
        lost = self._chance.random() < self._weather.lost and self._chance.choice(("request", "answer"))
        there, back = self._delay(), self._delay()
        answer: asyncio.Future[T] = self._loop.create_future()

        def arrive() -> None:
            if lost == "request":
                self._loop.call_later(back, fail, context=self._nobody)
                return
            self._record.note(self._actor, verb, ids())
            result = act()
            if lost:
                self._loop.call_later(back, fail, context=self._nobody)
            elif back:
                self._loop.call_later(back, succeed, result, context=self._nobody)
            else:
                succeed(result)

        def succeed(result: T) -> None:
            if not answer.done():
                answer.set_result(result)

        def fail() -> None:
            self._record.note(self._actor, f"{verb} lost its {lost}")
            if not answer.done():
                answer.set_exception(Unreachable(f"no answer to {verb}"))

        if there:
            self._loop.call_later(there, arrive, context=self._nobody)
        else:
            arrive()
        return await answer

    def _delay(self) -> float:
        rng, weather, drawn = self._chance, self._weather, self._chance.random()
        if drawn < weather.stalled:
            return rng.uniform(0, weather.stall_seconds)
        if drawn < weather.stalled + weather.slow:
            return rng.uniform(0, 0.5)
        return 0.0 if drawn > 0.35 else rng.uniform(0.001, 0.02)


class DistantStore:
    """The store as one relay sees it, through its wire."""

    def __init__(self, inner: MemoryStore, wire: Wire, record: Record) -> None:
        self.inner, self.wire, self.record = inner, wire, record
        self.lanes, self.admin, self.maintenance = inner.lanes, inner.admin, inner.maintenance
        self.operations = inner.operations
        self.journal = inner.journal
        self.topic_rule = inner.topic_rule

    async def heartbeat(self, relay: str, lease_seconds: float, *, first: bool) -> HeartbeatResult | None:
        return await self._ask("heartbeat", self.inner.heartbeat, relay, lease_seconds, first=first)

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        return await self._ask("claim", self.inner.claim, relay, lanes, ids=lambda: tuple(lanes))

    async def release(self, lease: Lease) -> None:
        await self._ask("release", self.inner.release, lease, ids=lambda: tuple(lease.epochs))

    async def leave(self, relay: str) -> None:
        await self._ask("leave", self.inner.leave, relay)

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        return await self._ask("fetch", self.inner.fetch, lease, quotas)

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        return await self._ask("blocked", self.inner.blocked, streams)

    async def due(self, lease: Lease, events_max: int) -> Due:
        return await self._ask("due", self.inner.due, lease, events_max)

    async def last_values(self, wanted: Sequence[tuple[str, Stream]]) -> dict[tuple[str, Stream], int]:
        return await self._ask("last_values", self.inner.last_values, wanted)

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        def ids() -> tuple[object, ...]:
            return tuple((type(s.outcome).__name__, self.record.label(s.event)) for s in settlements.outcomes())

        return await self._ask("settle", self.inner.settle, lease, settlements, ids=ids)

    async def renew_claim(self, claim: OptimisticClaim, event_ids: Sequence[UUID]) -> list[OutboxRow]:
        return await self._ask("renew_claim", self.inner.renew_claim, claim, event_ids)

    async def settle_claim(self, claim: OptimisticClaim, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        await self._ask("settle_claim", self.inner.settle_claim, claim, confirmed, yielded)

    async def notify(self) -> None:
        await self.inner.notify()

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._listening(wake)

    @asynccontextmanager
    async def _listening(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        async with self.inner.listen(wake):
            yield

    async def check(self) -> list[CheckResult]:
        return await self.inner.check()

    async def close(self) -> None:
        """The store outlives the relay."""

    async def _ask(
        self,
        verb: str,
        ask: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        ids: Callable[[], tuple[object, ...]] = tuple,
        **options: Any,
    ) -> T:
        return await self.wire.carry(verb, ids, lambda: at_once(ask(*args, **options)))
