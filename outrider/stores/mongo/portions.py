"""Portions: what one transaction writes must fit into the server's cache, beside that of everybody else.

The server answers a transaction that does not fit with a conflict, however often it is tried. Streams do not depend on
each other, so a settle may be several transactions; what belongs to one stream stays together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from outrider.event import StagedEvent, Stream
from outrider.store import Settlement

T = TypeVar("T")

PORTION_BYTES_MAX = 16 * 2**20


def of_events(events: Sequence[StagedEvent]) -> Iterator[list[StagedEvent]]:
    """Divide events that are confirmed, in their order."""
    return _filled(([event], len(event.payload)) for event in events)


def of_settlements(settlements: Iterable[Settlement]) -> Iterator[list[Settlement]]:
    """Divide settlements, those of a stream together."""
    streams: dict[Stream, list[Settlement]] = defaultdict(list)
    for settlement in settlements:
        streams[settlement.stream].append(settlement)
    return _filled((group, sum(len(each.event.payload) for each in group)) for group in streams.values())


def _filled(groups: Iterable[tuple[list[T], int]]) -> Iterator[list[T]]:
    portion: list[T] = []
    total = 0
    for group, size in groups:
        if portion and total + size > PORTION_BYTES_MAX:
            yield portion
            portion, total = [], 0
        portion += group
        total += size
    if portion:
        yield portion
