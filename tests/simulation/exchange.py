"""A model of a broker: it confirms some and refuses others in the same call, goes down, and loses answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from outrider.broker import Traits
from outrider.errors import Unreachable
from outrider.event import Message
from outrider.finding import Finding
from outrider.outcome import CONFIRMED, Confirmed, Refused, Rejected, Unresolved, Verdict
from tests.simulation.record import Fate, Record
from tests.simulation.wire import Wire

HEALTHY = Fate()


@dataclass(slots=True)
class Exchange:
    """The server, shared by all relays. `down` holds destinations that are out; the empty name is everything."""

    record: Record
    chance: random.Random
    ordered: bool
    down: dict[str, int] = field(default_factory=dict)

    def take(self, messages: Sequence[Message]) -> list[Verdict]:
        """Decide about the messages of one call, in order. Once the connection breaks, no verdict gets back."""
        verdicts: list[Verdict] = []
        failed: dict[tuple[str, str], Verdict] = {}
        for message in messages:
            stream = (message.topic, message.key)
            verdict = failed.get(stream) or self._verdict(message)
            if isinstance(verdict, Unresolved) and not verdict.destination:
                return [verdict] * len(messages)
            if self.ordered and not isinstance(verdict, Confirmed):
                failed[stream] = verdict
            verdicts.append(verdict)
        return verdicts

    def _verdict(self, message: Message) -> Verdict:
        if self.down.get(""):
            return Unresolved("the broker is down")
        if self.down.get(message.topic):
            return Unresolved("the topic is down", message.topic)
        entry = self.record.entries.get(UUID(message.message_id))
        fate = entry.fate if entry else HEALTHY
        if fate.poison:
            return Rejected("malformed") if fate.poison == "reject" else Unresolved("the connection was closed")
        if fate.nacks:
            fate.nacks -= 1
            return Refused("busy")
        self.record.append(message)
        self.record.note("broker", "append", (self.record.label_of(message),))
        if fate.lost_answers:
            fate.lost_answers -= 1
            return Unresolved("the answer was lost", self.chance.choice(("", message.topic)))
        return CONFIRMED


class ModelBroker:
    """A relay's connection to the exchange."""

    def __init__(
        self, exchange: Exchange, wire: Wire, traits: Traits, published: Callable[[], None] = lambda: None
    ) -> None:
        self.traits = traits
        self._exchange, self._wire, self._published = exchange, wire, published

    async def start(self) -> None:
        """The line is always there; what it carries may not arrive."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        def ids() -> tuple[object, ...]:
            return tuple(self._exchange.record.label_of(message) for message in messages)

        def act() -> list[Verdict]:
            self._published()
            return self._exchange.take(messages)

        try:
            return await self._wire.carry("publish", ids, act)
        except Unreachable as error:
            return [Unresolved(str(error))] * len(messages)

    async def probe(self, destination: str) -> None:
        down = await self._wire.carry("probe", lambda: (destination,), lambda: dict(self._exchange.down))
        if down.get("") or down.get(destination):
            raise Unreachable(f"destination {destination!r} is down")

    async def examine(self, topics: Sequence[str]) -> list[Finding]:
        """A model has no set-up."""
        return []

    def destination(self, message: Message) -> str:
        return message.topic

    async def close(self) -> None:
        """Nothing to let go of."""
