"""A model of a broker: it confirms some messages and nacks others in the same call, goes down, and loses answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from outrider.brokers.base import CONFIRMED, Capabilities, Confirmed, Nacked, PublishResult, Rejected, Unknown
from outrider.checks import CheckResult
from outrider.errors import Unreachable
from outrider.event import Message
from tests.simulation.record import Fate, Record
from tests.simulation.wire import Wire

HEALTHY = Fate()


@dataclass(slots=True)
class BrokerModel:
    """The server, shared by all relays. `down` holds destinations that are out; the empty name is everything."""

    record: Record
    rng: random.Random
    ordered: bool
    down: dict[str, int] = field(default_factory=dict)

    def take(self, messages: Sequence[Message]) -> list[PublishResult]:
        """Decide about the messages of one call, in order. Once the connection breaks, no publish result gets back."""
        results: list[PublishResult] = []
        failed: dict[tuple[str, str], PublishResult] = {}
        for message in messages:
            stream = (message.topic, message.key)
            result = failed.get(stream) or self._result(message)
            if isinstance(result, Unknown) and not result.destination:
                return [result] * len(messages)
            if self.ordered and not isinstance(result, Confirmed):
                failed[stream] = result
            results.append(result)
        return results

    def _result(self, message: Message) -> PublishResult:
        if self.down.get(""):
            return Unknown("the broker is down")
        if self.down.get(message.topic):
            return Unknown("the topic is down", message.topic)
        entry = self.record.entries.get(UUID(message.message_id))
        fate = entry.fate if entry else HEALTHY
        if fate.poison:
            return Rejected("malformed") if fate.poison == "reject" else Unknown("the connection was closed")
        if fate.nacks:
            fate.nacks -= 1
            return Nacked("busy")
        self.record.append(message)
        self.record.note("broker", "append", (self.record.label_of(message),))
        if fate.lost_answers:
            fate.lost_answers -= 1
            return Unknown("the answer was lost", self.rng.choice(("", message.topic)))
        return CONFIRMED


class ModelBroker:
    """A relay's connection to the exchange."""

    def __init__(
        self,
        broker_model: BrokerModel,
        wire: Wire,
        capabilities: Capabilities,
        published: Callable[[], None] = lambda: None,
    ) -> None:
        self.capabilities = capabilities
        self._exchange, self._wire, self._published = broker_model, wire, published

    async def start(self) -> None:
        """The line is always there; what it carries may not arrive."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        def ids() -> tuple[object, ...]:
            return tuple(self._exchange.record.label_of(message) for message in messages)

        def act() -> list[PublishResult]:
            self._published()
            return self._exchange.take(messages)

        try:
            return await self._wire.carry("publish", ids, act)
        except Unreachable as error:
            return [Unknown(str(error))] * len(messages)

    async def probe(self, destination: str) -> None:
        down = await self._wire.carry("probe", lambda: (destination,), lambda: dict(self._exchange.down))
        if down.get("") or down.get(destination):
            raise Unreachable(f"destination {destination!r} is down")

    async def check(self, topics: Sequence[str]) -> list[CheckResult]:
        """A model has no set-up."""
        return []

    def destination(self, message: Message) -> str:
        return message.topic

    async def close(self) -> None:
        """Nothing to let go of."""
