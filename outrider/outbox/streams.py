"""Streams: which events must stay in order. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from outrider.event import StagedEvent, Stream

TopicRule = Callable[[str, str | None, str | None], str]
"""(event_type, topic, routing_key) to topic."""


def topic_of(event: StagedEvent, rule: TopicRule) -> str:
    """Return the topic of an event; a foreign row may have none of its own."""
    return event.topic or rule(event.event_type, None, event.routing_key)


def stream_of(event: StagedEvent, rule: TopicRule) -> Stream:
    """Return the stream of an event."""
    return Stream(event.lane, topic_of(event, rule), event.key)


class Run(NamedTuple):
    """Events of one stream, in order, that go out together."""

    stream: Stream
    events: list[StagedEvent]
