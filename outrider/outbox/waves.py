"""Waves: what may be under way at once, by count, by size, and by stream. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from outrider.event import StagedEvent
from outrider.outbox.streams import TopicRule, topic_of

WAVE_BYTES_MAX = 4_000_000
"""Once so much payload is in a wave, the rest waits for the next: a slow network must confirm it within the timeout."""

_PAYLOAD = attrgetter("payload")

Alone = Callable[[StagedEvent], bool]
"""Tells whether an event must go out with nothing else."""


def payload_bytes(events: Iterable[StagedEvent]) -> int:
    """Return how much payload events have together."""
    return sum(map(len, map(_PAYLOAD, events)))


def fits(events: Iterable[StagedEvent]) -> bool:
    """Tell whether events are few bytes enough to go out at once."""
    return payload_bytes(events) <= WAVE_BYTES_MAX


def waves(events: Iterable[StagedEvent], rule: TopicRule) -> list[list[StagedEvent]]:
    """Split events into waves: the first of every stream, the second of every stream, and so on."""
    split: list[list[StagedEvent]] = []
    before: dict[tuple[int, str, str], int] = {}
    for event in events:
        # A plain tuple, because this runs for every event, and a named one takes four times as long.
        stream = (event.lane, topic_of(event, rule), event.key)
        number = before.get(stream, 0)
        before[stream] = number + 1
        if number == len(split):
            split.append([])
        split[number].append(event)
    return split


def portions(events: Sequence[StagedEvent], limit: int) -> list[Sequence[StagedEvent]]:
    """Split events, in order, into portions that may be under way at once. The limit is in events; see `fits`."""
    if len(events) <= limit and fits(events):
        return [events]
    split: list[list[StagedEvent]] = []
    size = 0
    for event in events:
        size += len(event.payload)
        if not split or len(split[-1]) >= limit or size > WAVE_BYTES_MAX:
            split.append([])
            size = len(event.payload)
        split[-1].append(event)
    return list(split)


def run_length(events: list[StagedEvent], room: int, room_bytes: int, alone: Alone | None) -> int:
    """Return how many of the first events may go together: one at least, however large."""
    if alone and alone(events[0]):
        return 1
    size = 0
    for index, event in enumerate(events[:room]):
        size += len(event.payload)
        if index and (size > room_bytes or (alone and alone(event))):
            return index
    return min(room, len(events))
