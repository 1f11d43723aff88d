"""Decisions of the journal's check about one event."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from outrider.outbox.journal import JournalProblem, examine
from outrider.outbox.model import EventHistory, EventPlace, JournalKind, JournalSwitch, OutboxJournalEntry

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ON = JournalSwitch(True, NOW, position=100)
K, P = JournalKind, JournalProblem
OUTBOX, ARCHIVE, DEAD = EventPlace.OUTBOX, EventPlace.ARCHIVE, EventPlace.DEAD_LETTERS


def history(*kinds: JournalKind, **places: int) -> EventHistory:
    """Return an event with entries of these kinds, in these tables."""
    entries = [OutboxJournalEntry(kind, "7", "0/1", NOW) for kind in kinds]
    return EventHistory(UUID(int=1), entries, {EventPlace(name): position for name, position in places.items()})


@pytest.mark.parametrize(
    "given",
    [
        history(K.STAGED, outbox=101),
        history(K.STAGED, K.ARCHIVED, archive=101),
        history(K.STAGED, K.SENT),
        history(K.STAGED, K.DEAD_LETTER, dead_letters=101),
        history(K.STAGED, K.DEAD_LETTER, K.STAGED, outbox=101),
        history(K.STAGED, K.DEAD_LETTER, K.STAGED, K.ARCHIVED, archive=101),
        history(K.STAGED, K.DEAD_LETTER, K.DISCARDED),
        history(K.STAGED, K.DEAD_LETTER, K.EXPIRED),
        history(K.STAGED, K.ARCHIVED, K.STAGED, K.RETRACTED, archive=101),
        history(K.STAGED, K.RETRACTED, dead_letters=99),
        history(K.RETRACTED, archive=99),
    ],
    ids=lambda given: "-".join(entry.kind for entry in given.entries),
)
def test_entries_that_agree_with_the_tables_are_no_problem(given: EventHistory) -> None:
    assert examine(given, ON) is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (history(K.STAGED), P.LOST),
        (history(K.STAGED, archive=101), P.UNSETTLED),
        (history(K.STAGED, dead_letters=101), P.UNSETTLED),
        (history(K.STAGED, K.ARCHIVED, outbox=101), P.STILL_THERE),
        (history(K.STAGED, K.DEAD_LETTER, outbox=101), P.STILL_THERE),
        (history(K.STAGED, K.DEAD_LETTER, K.DISCARDED, dead_letters=101), P.STILL_THERE),
        (history(K.STAGED, K.ARCHIVED), P.NOT_ARCHIVED),
        (history(K.STAGED, K.DEAD_LETTER), P.NO_DEAD_LETTER),
        (history(K.STAGED, K.ARCHIVED, K.ARCHIVED, archive=101), P.SETTLED_TWICE),
        (history(K.STAGED, K.DEAD_LETTER, K.SENT), P.SETTLED_TWICE),
        (history(K.ARCHIVED, archive=101), P.NOT_JOURNALED),
        (history(outbox=101), P.NOT_JOURNALED),
    ],
)
def test_a_disagreement_has_its_name(given: EventHistory, problem: JournalProblem) -> None:
    assert examine(given, ON) is problem


@pytest.mark.parametrize("place", [99, 101])
def test_an_event_from_before_the_switch_has_a_new_position_after_a_replay(place: int) -> None:
    assert examine(history(K.DEAD_LETTER, K.STAGED, outbox=place), ON) is None
    assert examine(history(K.DEAD_LETTER, K.STAGED, K.ARCHIVED, archive=place), ON) is None
    assert examine(history(K.DISCARDED, K.STAGED, K.ARCHIVED, archive=place), ON) is None


@pytest.mark.parametrize("kinds", [(), (K.ARCHIVED,), (K.DEAD_LETTER, K.STAGED, K.ARCHIVED)])
def test_an_event_from_before_the_switch_may_lack_its_first_entries(kinds: tuple[JournalKind, ...]) -> None:
    assert examine(history(*kinds, archive=100), ON) is None


def test_an_archive_that_maintenance_has_pruned_is_not_compared() -> None:
    pruned = ON._replace(archive_pruned=NOW + timedelta(seconds=1))
    assert examine(history(K.STAGED, K.ARCHIVED), pruned) is None
    long_ago = ON._replace(archive_pruned=NOW - timedelta(days=1))
    assert examine(history(K.STAGED, K.ARCHIVED), long_ago) is P.NOT_ARCHIVED
