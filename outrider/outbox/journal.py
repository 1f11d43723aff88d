"""The journal of the outbox: an entry for each event that is staged or settled, and the check that reads it.

An entry names the transaction that wrote it and its position in the log of the database. The journal is off by default.
Its switch is a row in the database, which each writing transaction reads: writers of all languages obey at once.

The check compares the entries of an event with the tables that hold the event. Both are read in one snapshot, page by
page. A finding concerns one event only, so no snapshot lasts longer than a page, and vacuum is never held back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from outrider.errors import Transient
from outrider.outbox.model import EventHistory, EventPlace, JournalKind, JournalSwitch, OutboxJournalEntry
from outrider.outbox.store import OutboxJournal

PAGE = 1_000
"""The number of entries or events of a page."""

FINDINGS_MAX = 1_000
"""The maximum of findings that are kept; the others are counted."""

ARCHIVE_SLACK = timedelta(minutes=1)
"""The longest time between the delivery of an event and its entry, which the same statement writes."""


class JournalProblem(StrEnum):
    """The disagreements between the journal and the tables."""

    LOST = "lost"
    NOT_JOURNALED = "not_journaled"
    UNSETTLED = "unsettled"
    STILL_THERE = "still_there"
    NOT_ARCHIVED = "not_archived"
    NO_DEAD_LETTER = "no_dead_letter"
    SETTLED_TWICE = "settled_twice"


PROBLEMS: Mapping[JournalProblem, str] = {
    JournalProblem.LOST: "staged and never settled, and in no table: something other than outrider deleted the event",
    JournalProblem.NOT_JOURNALED: "an entry is missing: something other than outrider deleted it, or its trigger",
    JournalProblem.UNSETTLED: "the event has left the outbox, and no entry says so",
    JournalProblem.STILL_THERE: "settled by its entries, and still in a table that it has left",
    JournalProblem.NOT_ARCHIVED: "archived by its entries, and not in the archive, which still keeps that time",
    JournalProblem.NO_DEAD_LETTER: "dead-lettered by its entries, and in no table: something deleted the dead letter",
    JournalProblem.SETTLED_TWICE: "settled twice, and not staged in between",
}
"""The texts of the problems."""


class JournalFinding(NamedTuple):
    """A disagreement about an event, with its last entry, if there is one, and the next command."""

    problem: JournalProblem
    event_id: UUID
    places: Sequence[EventPlace]
    entry: OutboxJournalEntry | None
    command: str


@dataclass(slots=True)
class JournalReport:
    """The result of a check. Without a journal that is on there is nothing to compare."""

    switch: JournalSwitch
    events: int = 0
    counts: Counter[JournalProblem] = field(default_factory=Counter)
    findings: list[JournalFinding] = field(default_factory=list)

    def add(self, history: EventHistory, problem: JournalProblem) -> None:
        """Count a finding, and keep it if there is room."""
        self.counts[problem] += 1
        if len(self.findings) < FINDINGS_MAX:
            entry = history.entries[-1] if history.entries else None
            command = f"outrider explain {history.event_id}"
            self.findings.append(JournalFinding(problem, history.event_id, sorted(history.places), entry, command))


async def compare(journal: OutboxJournal, progress: Callable[[JournalReport], None]) -> JournalReport:
    """Compare the journal with outbox, archive and dead letters. Raises Transient if the switch is turned meanwhile."""
    report = JournalReport(await journal.switch())
    if not report.switch.is_on:
        return report
    for place in (None, *EventPlace):
        after: UUID | None = None
        while True:
            reading = journal.histories(after, PAGE) if place is None else journal.unjournaled(place, after, PAGE)
            page = await reading
            if page.switch[:2] != report.switch[:2]:
                raise Transient("the journal was switched off or on during the check; run it again")
            for history in page.histories:
                report.events += bool(history.entries)
                if problem := examine(history, page.switch):
                    report.add(history, problem)
            progress(report)
            if (after := page.after) is None:
                break
    return report


def examine(  # noqa: PLR0911 - one return for each problem
    history: EventHistory, switch: JournalSwitch
) -> JournalProblem | None:
    """Return the disagreement between the entries of an event and the tables, None if they agree.

    An event that was staged before the journal was on may lack its first entries, and nothing else.
    """
    _, entries, places = history
    is_complete = any(position > switch.position for position in places.values())
    # An event from before the switch gets a new position with its next staging, which is a replay for instance.
    if not entries or (is_complete and all(entry.kind is not JournalKind.STAGED for entry in entries)):
        return JournalProblem.NOT_JOURNALED if is_complete else None
    last = _last(entries)
    if last is None:
        return JournalProblem.SETTLED_TWICE
    if last is JournalKind.RETRACTED:
        return None
    if last is JournalKind.STAGED:
        if EventPlace.OUTBOX in places:
            return None
        return JournalProblem.UNSETTLED if places else JournalProblem.LOST
    if EventPlace.OUTBOX in places:
        return JournalProblem.STILL_THERE
    if last is JournalKind.DEAD_LETTER:
        return None if EventPlace.DEAD_LETTERS in places else JournalProblem.NO_DEAD_LETTER
    if EventPlace.DEAD_LETTERS in places:
        return JournalProblem.STILL_THERE
    if last is JournalKind.ARCHIVED and EventPlace.ARCHIVE not in places and _is_kept(entries[-1], switch):
        return JournalProblem.NOT_ARCHIVED
    return None


def _last(entries: Sequence[OutboxJournalEntry]) -> JournalKind | None:
    """Return the last kind, without stagings that were taken back; None if the event was settled twice.

    The kind is `retracted` if the entries before the staging that was taken back are not known.
    """
    kinds: list[JournalKind] = []
    for entry in entries:
        if entry.kind is JournalKind.RETRACTED:
            kinds = kinds[:-1]
        elif kinds and entry.kind in _SETTLED and kinds[-1] is not JournalKind.STAGED:
            return None
        else:
            kinds.append(entry.kind)
    return kinds[-1] if kinds else JournalKind.RETRACTED


_SETTLED = frozenset({JournalKind.ARCHIVED, JournalKind.SENT, JournalKind.DEAD_LETTER})


def _is_kept(entry: OutboxJournalEntry, switch: JournalSwitch) -> bool:
    return switch.archive_pruned is None or entry.at >= switch.archive_pruned + ARCHIVE_SLACK
