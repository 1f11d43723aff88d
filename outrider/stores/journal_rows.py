"""Rows of the journal: conversion, and pages that hold all entries of an event, the same in every store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any
from uuid import UUID

from outrider.errors import UsageError
from outrider.outbox.model import EventHistory, EventPlace, JournalKind, JournalSwitch, OutboxJournalEntry

INSTALLED = "journal"
"""The fact of `outbox_meta` that exists since migration 0008."""

FIRST_EVENT = UUID(int=0)
"""The id before the first page."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_switch(facts: Mapping[str, int]) -> JournalSwitch:
    """Return the switch from the facts of `outbox_meta`; times are milliseconds since 1970.

    >>> to_switch({"journal": 1, "journal_position": 7}).position
    7
    """
    since, pruned = (_moment(facts.get(name)) for name in ("journal_since", "journal_archive_pruned"))
    return JournalSwitch(facts.get("journal") == 1, since, facts.get("journal_position", 0), pruned)


def check_installed(facts: Mapping[str, int]) -> None:
    """Reject a store without a journal.

    >>> check_installed({"journal": 0})
    """
    if INSTALLED not in facts:
        raise UsageError("the journal is not installed; run: outrider db migrate")


def _moment(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else _EPOCH + timedelta(milliseconds=milliseconds)


def to_milliseconds(moment: datetime) -> int:
    """Return a time as `outbox_meta` holds it.

    >>> to_milliseconds(datetime(1970, 1, 1, second=1, tzinfo=UTC))
    1000
    """
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def whole_events(rows: Sequence[Sequence[Any]], limit: int) -> Sequence[Sequence[Any]]:
    """Return the rows of events that are complete on a page: all but the last event of a full page.

    The result is empty if a full page has one event only; the caller then reads a longer page.

    >>> whole_events([("a", 1), ("b", 1)], 2)
    [('a', 1)]
    """
    return rows if len(rows) < limit else [row for row in rows if row[0] != rows[-1][0]]


def to_histories(rows: Iterable[Sequence[Any]], places: Iterable[Sequence[Any]]) -> list[EventHistory]:
    """Return events from rows of entries (event, kind, transaction, log position, time) and of places."""
    found: dict[UUID, dict[EventPlace, int]] = {}
    for place, event_id, position in places:
        found.setdefault(event_id, {})[EventPlace(place)] = position
    return [
        EventHistory(
            event_id,
            [OutboxJournalEntry(JournalKind(kind), *facts) for _, kind, *facts in group],
            found.get(event_id, {}),
        )
        for event_id, group in groupby(rows, key=lambda row: row[0])
    ]


def without_entry(rows: Iterable[Sequence[Any]], place: EventPlace) -> list[EventHistory]:
    """Return the events without an entry from rows of event, position, and whether there is an entry."""
    return [EventHistory(event_id, (), {place: position}) for event_id, position, journaled in rows if not journaled]
