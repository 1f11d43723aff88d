"""A model of a broker: it confirms some messages and nacks others in the same call, goes down, loses answers, and falls
silent about some topics.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from outrider.brokers.base import (
    CONFIRMED,
    Capabilities,
    Confirmed,
    Nacked,
    PublishResult,
    Rejected,
    Unanswered,
    Unknown,
)
from outrider.checks import CheckResult
from outrider.errors import Unreachable
from outrider.event import Message
from tests.simulation.record import Fate, Record
from tests.simulation.wire import Wire

HEALTHY = Fate()

ANSWER_SECONDS = 0.8
"""The time after which a connection stops waiting for a silent topic."""


@dataclass(slots=True, eq=False)
class SilentMessage:
    """A message that a silent topic has taken and not yet stored. `answer` is None once its sender has given up."""

    message: Message
    answer: asyncio.Future[PublishResult] | None
    call: object


@dataclass(slots=True)
class BrokerModel:
    """The server, shared by all relays. `down` holds destinations that are out; the empty name is everything.

    `mute` holds topics that take messages and answer nothing until they recover.
    """

    record: Record
    rng: random.Random
    ordered: bool
    down: dict[str, int] = field(default_factory=dict)
    mute: dict[str, int] = field(default_factory=dict)
    silent: list[SilentMessage] = field(default_factory=list)

    def take(self, messages: Sequence[Message]) -> list[PublishResult]:
        """Decide about the messages of one call, in order. Once the connection breaks, no publish result gets back."""
        results: list[PublishResult] = []
        failed: dict[tuple[str, str], PublishResult] = {}
        call = object()
        for message in messages:
            stream = (message.topic, message.key)
            result = failed.get(stream)
            if result is None:
                result = self._keep(message, call) if self._is_mute(message) else self._result(message)
            if isinstance(result, Unknown) and not result.destination:
                return [result] * len(messages)
            if self.ordered and not isinstance(result, Confirmed | Unanswered):
                failed[stream] = result
            results.append(result)
        return results

    def recover(self, topic: str) -> None:
        """Let a silent topic store what it has taken, in order, and answer those who still wait."""
        kept, self.silent = self.silent, []
        failed: dict[tuple[object, str], PublishResult] = {}
        for found in kept:
            if found.message.topic != topic:
                self.silent.append(found)
                continue
            stream = found.call, found.message.key
            result = failed.get(stream) or self._result(found.message)
            if self.ordered and not isinstance(result, Confirmed):
                # As in a publish that is answered at once: nothing is stored behind a message that failed.
                failed[stream] = result
            if found.answer is not None and not found.answer.done():
                found.answer.set_result(result)

    def _is_mute(self, message: Message) -> bool:
        return bool(self.mute.get(message.topic)) and not self.down.get("")

    def _keep(self, message: Message, call: object) -> PublishResult:
        loop = asyncio.get_running_loop()
        found = SilentMessage(message, loop.create_future(), call)
        self.silent.append(found)
        loop.call_later(ANSWER_SECONDS, self._give_up, found)
        assert found.answer is not None
        return Unanswered(message.topic, found.answer)

    def _give_up(self, found: SilentMessage) -> None:
        if found.answer is not None and not found.answer.done():
            found.answer.set_result(Unknown("no answer in time", found.message.topic))
        found.answer = None
        # A broker that keeps order purges a message that was given up, and others may store it later.
        if self.ordered and found in self.silent:
            self.silent.remove(found)

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
        self._unconfirmed: set[str] = set()

    async def start(self) -> None:
        """The line is always there; what it carries may not arrive."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        def ids() -> tuple[object, ...]:
            return tuple(self._exchange.record.label_of(message) for message in messages)

        def act() -> list[PublishResult]:
            self._published()
            return self._exchange.take(messages)

        try:
            results = await self._wire.carry("publish", ids, act)
        except Unreachable as error:
            return [Unknown(str(error))] * len(messages)
        for result in results:
            if isinstance(result, Unanswered):
                result.answer.add_done_callback(self._note)
        return results

    def _note(self, answer: asyncio.Future[PublishResult]) -> None:
        if not answer.cancelled() and isinstance(found := answer.result(), Unknown):
            self._unconfirmed.add(found.destination)

    async def publish_apart(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        results = await self.publish(messages)
        return [await result.answer if isinstance(result, Unanswered) else result for result in results]

    async def probe(self, destination: str) -> None:
        down = await self._wire.carry("probe", lambda: (destination,), lambda: dict(self._exchange.down))
        if down.get("") or down.get(destination):
            raise Unreachable(f"destination {destination!r} is down")
        if destination in self._unconfirmed:
            # As with RabbitMQ: a probe cannot tell, so the first after a silence fails.
            self._unconfirmed.discard(destination)
            raise Unreachable(f"destination {destination!r} did not answer lately")

    async def check(self, topics: Sequence[str]) -> list[CheckResult]:
        """A model has no set-up."""
        return []

    def destination(self, message: Message) -> str:
        return message.topic

    async def close(self) -> None:
        """Nothing to let go of."""
