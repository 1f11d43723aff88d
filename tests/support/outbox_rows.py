"""Building blocks for unit tests: events as a store would hold them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from outrider.event import OutboxRow, Readiness, Stream
from outrider.outbox.model import State


def staged(position: int, key: str = "A", **changes: Any) -> OutboxRow:
    """Return an event of a key on the topic `orders`, with whatever should be different."""
    event = OutboxRow(
        position=position,
        event_id=UUID(int=position, version=4),
        event_type="order.placed",
        aggregate_type=None,
        aggregate_id=None,
        payload=b"{}",
        headers=b"{}",
        topic="orders",
        key=key,
        routing_key=None,
        lane=0,
        schema_version="1",
        saga_id=None,
        sequence=None,
        max_attempts=None,
        retry=None,
        attempts=0,
        state=State.PENDING,
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
        available_at=None,
        readiness=Readiness.READY,
        suspect=False,
    )
    return event._replace(**changes)


def stream(key: str = "A", topic: str = "orders", lane: int = 0) -> Stream:
    """Return the stream of `staged(..., key)`."""
    return Stream(lane, topic, key)
