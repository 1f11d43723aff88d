"""A memory broker with scripted results, a manual clock and a recording observer for tests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

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
from outrider.checks import CheckResult, fail, ok
from outrider.errors import Unreachable
from outrider.event import Message
from outrider.telemetry.events import TelemetryEvent

Script = Callable[[Message], PublishResult]

F = TypeVar("F", bound=TelemetryEvent)


class MemoryBroker:
    """A broker in memory that confirms every message by default.

    `script` decides the result of single messages; an `Unknown` result breaks the connection and leaves all messages of
    the same call unresolved. `down` names the destinations that are unreachable; the empty name is the whole broker.
    `mute` names the topics that take messages and do not answer, until the test calls `answer`.

    >>> MemoryBroker(ordered=True).capabilities.ordered
    True
    """

    def __init__(self, *, ordered: bool = False, script: Script | None = None) -> None:
        self.capabilities = Capabilities(ordered=ordered)
        self.script: Script = script or (lambda message: CONFIRMED)
        self.down: set[str] = set()
        self.mute: set[str] = set()
        self.waiting: list[tuple[Message, asyncio.Future[PublishResult]]] = []
        self.log: list[Message] = []
        self.calls: list[list[str]] = []

    def of_key(self, key: str) -> list[str]:
        """Return the ids delivered for a key, without duplicates, in order of first delivery."""
        return list(dict.fromkeys(message.message_id for message in self.log if message.key == key))

    async def start(self) -> None:
        """Do nothing: there is no connection."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish messages with the scripted results."""
        self.calls.append([message.message_id for message in messages])
        results = [self._result(message) for message in messages]
        breaking = next((v for v in results if isinstance(v, Unknown) and not v.destination), None)
        if breaking is not None:
            return [breaking] * len(messages)
        if self.capabilities.ordered:
            results = _nack_after_failures(messages, results)
        self.log += [m for m, result in zip(messages, results, strict=True) if isinstance(result, Confirmed)]
        return results

    def _result(self, message: Message) -> PublishResult:
        if "" in self.down:
            return Unknown("the broker is down")
        if message.topic in self.down:
            return Unknown("the topic is down", message.topic)
        if message.topic in self.mute:
            answer: asyncio.Future[PublishResult] = asyncio.get_running_loop().create_future()
            self.waiting.append((message, answer))
            return Unanswered(message.topic, answer)
        if len(message.body) > self.capabilities.message_bytes_max:
            return Rejected(f"{len(message.body)} bytes are too many")
        return self.script(message)

    def answer(self, topic: str, result: PublishResult = CONFIRMED) -> None:
        """Answer the messages to a mute topic. The topic stays mute for new messages."""
        answered = [(message, answer) for message, answer in self.waiting if message.topic == topic]
        self.waiting = [(message, answer) for message, answer in self.waiting if message.topic != topic]
        for message, answer in answered:
            if isinstance(result, Confirmed):
                self.log.append(message)
            answer.set_result(result)

    async def probe(self, destination: str) -> None:
        """Fail while the destination is down or mute."""
        if self.down & {"", destination} or destination in self.mute:
            raise Unreachable(f"destination {destination!r} is down")

    async def check(self, topics: Sequence[str]) -> list[CheckResult]:
        """Report the topics that are down."""
        down = [topic for topic in topics if self.down & {"", topic}]
        found = fail("memory-broker", f"down: {', '.join(down)}", "bring it back") if down else None
        return [found or ok("memory-broker", "up")]

    def destination(self, message: Message) -> str:
        """Return the topic: each topic fails separately."""
        return message.topic

    async def close(self) -> None:
        """Do nothing: there is no connection."""


def _nack_after_failures(messages: Sequence[Message], results: list[PublishResult]) -> list[PublishResult]:
    """Fail every message after a failure in the same stream, as an ordered broker guarantees."""
    failed: dict[tuple[str, str], bool] = defaultdict(bool)
    kept: list[PublishResult] = []
    for message, result in zip(messages, results, strict=True):
        stream = (message.topic, message.key)
        kept.append(Nacked("an earlier message of its stream failed") if failed[stream] else result)
        failed[stream] |= isinstance(result, Nacked | Rejected | Unknown)
    return kept


class ManualClock:
    """A wall clock and a boot clock, advanced together by the test.

    >>> clock = ManualClock()
    >>> clock.advance(seconds=90)
    >>> clock.boot_seconds()
    90.0
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._start = start or datetime(2030, 1, 1, tzinfo=UTC)
        self._elapsed = 0.0

    def now(self) -> datetime:
        """Return the wall time."""
        return self._start + timedelta(seconds=self._elapsed)

    def boot_seconds(self) -> float:
        """Return the seconds by which the test has advanced the clock."""
        return self._elapsed

    def advance(self, *, seconds: float) -> None:
        """Advance the clock."""
        self._elapsed += seconds


class RecordingObserver:
    """Records every telemetry event, in order.

    >>> RecordingObserver().of(TelemetryEvent)
    []
    """

    def __init__(self) -> None:
        self.events: list[TelemetryEvent] = []

    def emit(self, event: TelemetryEvent) -> None:
        """Record the telemetry event."""
        self.events.append(event)

    def of(self, kind: type[F]) -> list[F]:
        """Return the telemetry events of one type."""
        return [event for event in self.events if isinstance(event, kind)]
