"""A broker in memory whose behaviour a test can script."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from outrider.broker import Traits
from outrider.errors import Unreachable
from outrider.event import Message
from outrider.finding import Finding, ok, refuse
from outrider.outcome import CONFIRMED, Confirmed, Refused, Rejected, Unresolved, Verdict

Script = Callable[[Message], Verdict]


class MemoryBroker:
    """Confirms everything, unless told otherwise.

    `script` decides about single messages; a message it leaves `Unresolved` breaks the connection, so that everything
    sent with it is unresolved too. `down` names destinations that are out; the empty name is the whole broker.

    >>> MemoryBroker(ordered=True).traits.ordered
    True
    """

    def __init__(self, *, ordered: bool = False, script: Script | None = None) -> None:
        self.traits = Traits(ordered=ordered)
        self.script: Script = script or (lambda message: CONFIRMED)
        self.down: set[str] = set()
        self.log: list[Message] = []
        self.calls: list[list[str]] = []

    def of_key(self, key: str) -> list[str]:
        """Return the ids delivered for a key, duplicates removed, in order of their first delivery."""
        return list(dict.fromkeys(message.message_id for message in self.log if message.key == key))

    async def start(self) -> None:
        """Nothing to connect."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Take messages as scripted."""
        self.calls.append([message.message_id for message in messages])
        verdicts = [self._verdict(message) for message in messages]
        breaking = next((v for v in verdicts if isinstance(v, Unresolved) and not v.destination), None)
        if breaking is not None:
            return [breaking] * len(messages)
        if self.traits.ordered:
            verdicts = _in_order(messages, verdicts)
        self.log += [m for m, verdict in zip(messages, verdicts, strict=True) if isinstance(verdict, Confirmed)]
        return verdicts

    def _verdict(self, message: Message) -> Verdict:
        if "" in self.down:
            return Unresolved("the broker is down")
        if message.topic in self.down:
            return Unresolved("the topic is down", message.topic)
        if len(message.body) > self.traits.message_bytes_max:
            return Rejected(f"{len(message.body)} bytes are too many")
        return self.script(message)

    async def probe(self, destination: str) -> None:
        """Fail while the destination is down."""
        if self.down & {"", destination}:
            raise Unreachable(f"destination {destination!r} is down")

    async def examine(self, topics: Sequence[str]) -> list[Finding]:
        """Say which of the topics are down."""
        down = [topic for topic in topics if self.down & {"", topic}]
        found = refuse("memory-broker", f"down: {', '.join(down)}", "bring it back") if down else None
        return [found or ok("memory-broker", "up")]

    def destination(self, message: Message) -> str:
        """Topics fail one by one."""
        return message.topic

    async def close(self) -> None:
        """Nothing to disconnect."""


def _in_order(messages: Sequence[Message], verdicts: list[Verdict]) -> list[Verdict]:
    """Keep the promise of an ordered broker: what follows a failure in its stream fails too."""
    failed: dict[tuple[str, str], bool] = defaultdict(bool)
    kept: list[Verdict] = []
    for message, verdict in zip(messages, verdicts, strict=True):
        stream = (message.topic, message.key)
        kept.append(Refused("an earlier message of its stream failed") if failed[stream] else verdict)
        failed[stream] |= isinstance(verdict, Refused | Rejected | Unresolved)
    return kept
