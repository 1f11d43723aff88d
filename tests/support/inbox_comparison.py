"""A comparison of two inboxes, step by step, whatever is delivered and whatever fails."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

from outrider.errors import Permanent
from outrider.event import Delivery, InboxStream
from outrider.inbox.model import InboxCriteria
from outrider.stores.memory import MemoryStore
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, delivery, marker
from tests.support.memory_benches import MemoryInboxBench

STEPS = 60
BANDS = {"a": "normal", "b": "normal", "c": "high"}
"""Keys and their bands."""


class Pair:
    """Two inboxes that get the same calls; every answer is compared."""

    def __init__(self, known: InboxBench, other: InboxBench, rng: random.Random) -> None:
        self.benches = (known, other)
        self.rng = rng
        self.sent: list[Delivery] = []
        settings: dict[str, Any] = {
            "ordering": rng.choice(["off", "monotonic", "strict"]),
            "first_sequence": rng.choice(["one", "first_seen"]),
            "on_dead_letter": rng.choice(["block", "skip"]),
            "batch_max": 4,
        }
        self.hands = [bench.consumer(**settings) for bench in self.benches]

    async def deliver(self) -> None:
        """Deliver a batch in which nothing fails: otherwise it would be tried again piece by piece, beside a drain."""
        for bench in self.benches:
            bench.failing.clear()
        await self._deliver([self._delivery() for _ in range(self.rng.randrange(1, 5))])

    async def deliver_to_failing_handlers(self) -> None:
        error = self.rng.choice([RuntimeError("broken"), Permanent("never")])
        name, times = f"{self.rng.choice([*BANDS])}:{self.rng.randrange(1, 9)}", self.rng.randrange(1, 4)
        for bench in self.benches:
            bench.fail(name, *[error] * times)
        await self._deliver([self._delivery()])

    async def _deliver(self, batch: list[Delivery]) -> None:
        self.sent += batch
        done = [await hand.deliver(*batch) for hand in self.hands]
        assert done[0] == done[1]

    def _delivery(self) -> Delivery:
        rng, key = self.rng, self.rng.choice([*BANDS])
        if self.sent and rng.random() < 0.2:
            return rng.choice(self.sent)
        number = rng.choice([None, *range(1, 9)])
        event_id = UUID(int=rng.getrandbits(128), version=4)
        if number is not None and rng.random() < 0.05:
            return marker(number, key=key)
        made = delivery(number, key=key, event_id=event_id, band=BANDS[key])
        return made._replace(body=b"{") if rng.random() < 0.1 else made

    async def run_admin_command(self) -> None:
        verb = self.rng.choice(["replay", "discard", "release"])
        if verb == "release":
            stream = InboxStream("orders", self.rng.choice([*BANDS]), self.rng.choice([0, 1]))
            answers: list[Any] = [await bench.store.admin.skip_gap("billing", stream, "ann") for bench in self.benches]
        else:
            dead_letters = [await self._dead_letters(bench) for bench in self.benches]
            chosen = self.rng.sample(range(len(dead_letters[0])), min(len(dead_letters[0]), 2))
            answers = [
                await getattr(bench.store.admin, verb)([found[side]["id"] for side in chosen], "ann")
                for bench, found in zip(self.benches, dead_letters, strict=True)
            ]
        assert answers[0] == answers[1]

    async def drain(self) -> None:
        for hand in self.hands:
            await hand.drain()

    async def prune(self) -> None:
        for bench in self.benches:
            await bench.advance(seconds=5 * 86_400)
        # Receipts stay: for how long beside a dead letter is each store's own affair.
        pruned = [await b.store.prune("billing", receipt_days=10**4, dead_letter_days=12) for b in self.benches]
        assert pruned[0] == pruned[1]

    async def compare(self) -> None:
        states = [await self._state(bench) for bench in self.benches]
        assert states[1] == states[0]

    async def _dead_letters(self, bench: InboxBench) -> list[dict[str, Any]]:
        """List dead letters, in an order that does not depend on which stream was faster."""
        dead_letters = await bench.store.admin.dead_letters(InboxCriteria(limit=1000))
        return sorted(dead_letters, key=lambda dead_letter: dead_letter["event_id"])

    async def _state(self, bench: InboxBench) -> tuple[Any, ...]:
        streams = [
            tuple(stream[name] for name in ("topic", "key", "band", "seen", "cause", "waiting"))
            for stream in await bench.store.admin.streams(None, 1000)
        ]
        effects = await bench.effects()
        by_key = {key: [effect for effect in effects if effect.startswith(key)] for key in BANDS}
        return (
            by_key,
            await bench.store.admin.counts(),
            sorted(streams),
            [_named(x) for x in await self._dead_letters(bench)],
        )


def _named(dead_letter: dict[str, Any]) -> dict[str, Any]:
    """All of a dead letter that stores must agree on."""
    return {name: value for name, value in dead_letter.items() if name not in ("id", "dead_lettered_at")}


async def compare_with_memory(bench: InboxBench, seed: int) -> None:
    rng, clock = random.Random(seed), ManualClock()
    pair = Pair(MemoryInboxBench(MemoryStore(clock=clock), clock), bench, rng)
    verbs = [pair.deliver, pair.deliver, pair.deliver_to_failing_handlers, pair.run_admin_command, pair.prune]
    for _ in range(STEPS):
        await rng.choice(verbs)()
        await pair.drain()
        await pair.compare()
