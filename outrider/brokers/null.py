"""The null broker: confirms every message and discards it. For benchmarks only.

The null broker measures the speed of a relay and its store without the cost of a broker. Messages are not delivered, so
real events would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.brokers.base import CONFIRMED, Capabilities, PublishResult
from outrider.checks import CheckResult, fail
from outrider.event import Message

CHECKS = {"null-broker": "messages go somewhere"}


class NullBroker:
    """Confirms every message and stores none.

    >>> NullBroker().capabilities.ordered
    True
    """

    def __init__(self, url: str = "null://") -> None:
        self.capabilities = Capabilities(ordered=True)

    async def start(self) -> None:
        """Do nothing: there is no connection."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Confirm every message at once."""
        return [CONFIRMED] * len(messages)

    async def probe(self, destination: str) -> None:
        """Succeed always."""

    async def check(self, topics: Sequence[str]) -> list[CheckResult]:
        """Return a check result with a warning about the null broker."""
        return [fail("null-broker", "every message is confirmed and forgotten", "name a broker that keeps them")]

    def destination(self, message: Message) -> str:
        """Return the empty name: no destination can fail."""
        return ""

    async def close(self) -> None:
        """Do nothing: there is no connection."""
