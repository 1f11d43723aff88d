"""Sealing what goes out: events become the messages of a wave. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from outrider.codec.seal import seal
from outrider.event import BAND_NAMES, Message, StagedEvent
from outrider.outbox.streams import Run, TopicRule, topic_of


class Sealed(NamedTuple):
    """A run with its messages."""

    run: Run
    messages: list[Message]


def seal_all(events: Iterable[StagedEvent], rule: TopicRule, lanes: int) -> list[Message]:
    """Encode events at once; return nothing if one of them cannot be encoded, for then each run is looked at."""
    try:
        return [seal(event, topic_of(event, rule), BAND_NAMES[event.lane // lanes]) for event in events]
    except Exception:
        # Which event it is, and what is said about it, is for who seals run by run, and meets it again.
        return []


def events_of(runs: Iterable[Run]) -> Iterator[StagedEvent]:
    """Return the events of runs, one after the other."""
    return (event for run in runs for event in run.events)


def joined(batch: list[Sealed]) -> tuple[list[Run], list[Message]]:
    """Return the runs, and the messages of all of them."""
    return [sealed.run for sealed in batch], [message for sealed in batch for message in sealed.messages]
