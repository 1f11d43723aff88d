"""The null broker: confirms every message and forgets it. For benchmarks only.

It measures what a relay and its store can do when the broker costs nothing. Nothing is delivered anywhere, so using it
on events that matter loses them.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.broker import Traits
from outrider.event import Message
from outrider.finding import Finding, refuse
from outrider.outcome import CONFIRMED, Verdict

CHECKS = {"null-broker": "messages go somewhere"}


class NullBroker:
    """Takes everything, keeps nothing.

    >>> NullBroker().traits.ordered
    True
    """

    def __init__(self) -> None:
        self.traits = Traits(ordered=True)

    async def start(self) -> None:
        """Nothing to connect."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Confirm everything at once."""
        return [CONFIRMED] * len(messages)

    async def probe(self, destination: str) -> None:
        """Always up."""

    async def examine(self, topics: Sequence[str]) -> list[Finding]:
        """Say what it is."""
        return [refuse("null-broker", "every message is confirmed and forgotten", "name a broker that keeps them")]

    def destination(self, message: Message) -> str:
        """Nothing can be down on its own."""
        return ""

    async def close(self) -> None:
        """Nothing to disconnect."""
