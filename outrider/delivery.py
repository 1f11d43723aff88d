"""The delivery: a message as it came off the wire, before anybody has looked into it; and the arrival, once opened.

Nothing about a delivery can be trusted: anyone may write to a topic. What is kept of it is bytes, so that a message
nobody understands can be kept whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from outrider.event import Event


class Delivery(NamedTuple):
    """A message as received.

    `shard` names what a source gives and takes back as a whole, such as a partition. `place` names where the message
    lies in the broker, the same each time it is delivered; empty where a broker has no such thing. `token` is the
    source's own.

    >>> Delivery("orders", b"A-1", b"{}").place
    ''
    """

    topic: str
    key: bytes | None
    body: bytes
    headers: Mapping[str, bytes] = {}
    shard: str = ""
    place: str = ""
    token: Any = None


class InboxStream(NamedTuple):
    """What stays in order at a consumer, and what a gate counts: one key on one topic, in one priority band."""

    topic: str
    key: str
    band: int = 1


class Arrival(NamedTuple):
    """A delivery, opened. Either `event` is there, or `problem` says why it cannot be.

    Without a key that can be read (`keyed`) its stream is its own. `gapless` says that its stream was numbered by us,
    so that a missing number means a missing event. `waiting_id` is its row if it comes from the waiting events.
    """

    event_id: UUID
    event: Event | None
    problem: str
    stream: InboxStream
    sequence: int | None
    delivery: Delivery
    keyed: bool = True
    gapless: bool = False
    replayed: bool = False
    skipped: bool = False
    waiting_id: int | None = None

    @property
    def event_type(self) -> str:
        """Name the event's type, empty if it could not be read."""
        return self.event.event_type if self.event else ""
