"""The source contract: deliveries for one consumer, from a broker.

Rules every adapter keeps, and the contract suite checks:

1. What is not acked comes again, to this process or another, and in another shard: a shard that comes back has another
   name. Nothing is acked before the engine says so.
2. Deliveries of one shard come in the broker's order. Acks may come in any order: only what has no gap before it is
   told to the broker.
3. Before a shard goes to another process, `revoked` is awaited, for a bounded time; acks of a shard that is gone are
   ignored.
4. `receive` must be called again and again: it is also the heartbeat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, runtime_checkable

from outrider.delivery import Delivery
from outrider.finding import Finding

Revoked = Callable[[frozenset[str]], Awaitable[None]]
"""Told which shards are being taken away; returns when nothing of them is under way."""


class Source(Protocol):
    """Where deliveries come from."""

    async def start(self, revoked: Revoked) -> None:
        """Connect and subscribe; raise Unreachable if the broker does not answer, Misuse if it cannot work so."""
        ...

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Return what has come, at most so many, of shards that are not paused; wait a moment if there is nothing.

        Raises Transient when the connection is lost; then `start` may be called again.
        """
        ...

    def ack(self, delivery: Delivery) -> None:
        """Note that a delivery is done; its effects are committed. The broker is told soon."""
        ...

    async def close(self) -> None:
        """Tell the broker what is done, and leave."""
        ...


@runtime_checkable
class Examining(Protocol):
    """A source with something of its own on the broker, such as a queue, that may be wrong."""

    async def examine(self) -> list[Finding]:
        """Look at it and judge; changes nothing, and needs no start."""
        ...
