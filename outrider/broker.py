"""The broker contract: a batch of messages in, one verdict per message out.

Rules every adapter keeps, and the contract suite checks:

1. `Confirmed` means durable at the broker. Anything else may or may not have arrived.
2. `publish` does not raise for what happens to messages; it returns verdicts, in the order given. It never hangs:
   the caller's timeout may cancel it, and the adapter is usable afterwards.
3. `traits.ordered` promises that within one call, a message that is not confirmed leaves no later message of the same
   topic and key confirmed. Without that promise the relay sends at most one event per stream at a time.
4. `examine` changes nothing and sends nothing of the user's. What it cannot know, it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from outrider.event import Message
from outrider.finding import Finding
from outrider.outcome import Verdict


@dataclass(frozen=True, slots=True)
class Traits:
    """What an adapter can promise. A publish that goes badly has its verdicts after `publish_seconds`."""

    ordered: bool = False
    message_bytes_max: int = 1_048_576
    publish_seconds: float = 0.0


class Broker(Protocol):
    """Where messages go."""

    traits: Traits

    async def start(self) -> None:
        """Connect; raise Unreachable if the broker does not answer."""
        ...

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Hand over messages and wait for each one's verdict."""
        ...

    async def probe(self, destination: str) -> None:
        """Check, without a message of the user's, that a destination would take one; raise Transient if not."""
        ...

    def destination(self, message: Message) -> str:
        """Name what can be down on its own for this message, such as its topic. Empty means only the connection."""
        ...

    async def examine(self, topics: Sequence[str]) -> list[Finding]:
        """Say how the broker is set up for these topics, good and bad; raise Unreachable if it does not answer."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


@runtime_checkable
class Retaining(Protocol):
    """A broker that keeps messages after they were acked, and so may deliver them again much later."""

    async def retention_days(self, topics: Sequence[str]) -> Mapping[str, float]:
        """Return how long each topic is kept, infinity for ever. What is missing or may not be seen is left out."""
        ...
