"""The broker contract: a list of messages in, a list of publish results out.

Every adapter keeps these rules, and the contract suite checks them:

1. `Confirmed` means durable at the broker. With any other result the message may or may not have arrived.
2. `publish` returns results in the order of the messages, and raises no error for a failed message. The caller's
   timeout may cancel a publish; the adapter is usable afterwards.
3. `capabilities.ordered` is a promise about a single call: a message without a confirmation leaves no later message of
   the same topic and key confirmed. Without the promise the relay sends at most one event per stream at a time.
4. `check` is read-only and sends no message of the user. Facts that cannot be determined are reported as unknown.
5. With `publish_promptly` a destination without an answer holds up no other: the messages that are still without an
   answer a while after the others are `Unanswered`. `publish` waits for every answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from outrider.checks import CheckResult
from outrider.event import DeadLetterReason, Delivery, Message

Revoked = Callable[[frozenset[str]], Awaitable[None]]
"""Callback with the partitions that the broker is about to revoke. Returns when no delivery of the partitions is in
progress.
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The promises of an adapter. A failing publish returns its results after `publish_seconds`.

    `name` is the broker and its address, for error texts.
    """

    ordered: bool = False
    message_bytes_max: int = 1_048_576
    publish_seconds: float = 0.0
    name: str = "the broker"


class Broker(Protocol):
    """A broker, as a relay uses it."""

    capabilities: Capabilities

    async def start(self) -> None:
        """Connect; raise Unreachable if the broker does not answer."""
        ...

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish messages; return one publish result per message, in the same order."""
        ...

    async def probe(self, destination: str) -> None:
        """Check that a destination accepts messages, without sending a user's message; raise Transient if not."""
        ...

    def destination(self, message: Message) -> str:
        """Return the name of the part of the broker that can fail alone for a message, such as the topic.

        An empty name means that only the whole connection can fail.
        """
        ...

    async def check(self, topics: Sequence[str]) -> list[CheckResult]:
        """Return good and bad check results about the setup for the topics; raise Unreachable without an answer."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


@runtime_checkable
class PublishesPromptly(Protocol):
    """A broker whose destinations answer separately."""

    async def publish_promptly(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish messages, and return soon after the last answer, with `Unanswered` for the rest."""
        ...


@runtime_checkable
class PublishesApart(Protocol):
    """A broker that can publish messages apart from all others, for a destination that may not work.

    Neither a missing answer nor an error of such a publish affects another publish.
    """

    async def publish_apart(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish messages of one destination; return one final publish result per message, in the same order."""
        ...


@runtime_checkable
class HasRetention(Protocol):
    """A broker that keeps acked messages, and may therefore deliver a message again much later."""

    async def retention_days(self, topics: Sequence[str]) -> Mapping[str, float]:
        """Return the retention of each topic in days, infinity for unlimited. Missing or hidden topics are omitted."""
        ...


class Source(Protocol):
    """A source of deliveries, as a consumer uses it."""

    async def start(self, revoked: Revoked) -> None:
        """Connect and subscribe.

        Raises Unreachable if the broker does not answer, and UsageError if the configuration cannot work.
        """
        ...

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Return at most `limit` deliveries from partitions that are not paused; wait briefly if there are none.

        Raises Transient when the connection is lost; then `start` may be called again.
        """
        ...

    def ack(self, delivery: Delivery) -> None:
        """Mark a delivery as done, after the commit of its effects. The broker gets the ack soon afterwards."""
        ...

    async def close(self) -> None:
        """Send the outstanding acks to the broker and disconnect."""
        ...


@runtime_checkable
class SupportsChecks(Protocol):
    """A source that depends on an object of the broker, such as a queue, which may be set up wrong."""

    async def check(self) -> list[CheckResult]:
        """Check the setup of the source. Read-only; needs no `start`."""
        ...


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has stored the message. The event becomes sent."""


@dataclass(frozen=True, slots=True)
class Nacked:
    """The broker rejected the message for now and may accept it later; an attempt is counted."""

    error: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The broker will never accept the message; the event is dead-lettered."""

    error: str
    reason: DeadLetterReason = DeadLetterReason.PERMANENT_FAILURE


@dataclass(frozen=True, slots=True)
class Unknown:
    """The result is unknown: `destination` is down, or the connection if the name is empty."""

    error: str
    destination: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Unanswered:
    """The destination has not answered yet. `answer` gets the publish result, after the adapter's time limit at the
    latest.

    The message is still in progress, so no later message of its stream may be sent before the answer.
    """

    destination: str
    answer: asyncio.Future[PublishResult]


PublishResult = Confirmed | Nacked | Rejected | Unknown | Unanswered


CONFIRMED = Confirmed()
