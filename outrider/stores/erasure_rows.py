"""Rows of subjects: the texts by which stores find them, and their records, the same in every store."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from outrider.errors import Permanent
from outrider.event import SUBJECT_HEADER, subject_hash
from outrider.privacy.erasure_store import (
    Blocker,
    Blocking,
    ErasurePlace,
    ErasureRun,
    Replacement,
    Runs,
    SubjectRow,
    add_counts,
)

NAMES: Mapping[ErasurePlace, str] = {
    ErasurePlace.DEAD_LETTER: "dead_letter",
    ErasurePlace.CONSUMER_DEAD_LETTER: "consumer_dead_letter",
    ErasurePlace.ARCHIVED_EVENT: "archived_event",
    ErasurePlace.SAGA: "saga",
    ErasurePlace.REMOVED_SAGA: "removed_saga",
}
"""The name of a place in the names of queries."""

BLOCKING: Mapping[Blocker, str] = {
    Blocker.EVENT: "undelivered_events",
    Blocker.DEAD_LETTER: "blocking_dead_letters",
    Blocker.HELD_EVENT: "held_events",
    Blocker.CONSUMER_DEAD_LETTER: "blocking_consumer_dead_letters",
    Blocker.SAGA: "unended_sagas",
}
"""The queries of rows that stand in the way."""

ENCODED = frozenset({Blocker.HELD_EVENT, Blocker.CONSUMER_DEAD_LETTER, ErasurePlace.CONSUMER_DEAD_LETTER})
"""The tables whose headers are an object of base64, because any sender may have written them."""


def needles(subjects: Iterable[str], kind: ErasurePlace | Blocker) -> list[str]:
    """Return the texts of which one is in the headers of each row of the subjects, and perhaps of other rows.

    JSON may spell each character as an escape, and other programs do so. Headers with a backslash, which are rare, are
    therefore read in any case, and so are numbers, which the wire carries as text.

    >>> needles(["customer:42"], ErasurePlace.ARCHIVED_EVENT)
    ['"customer:42"', '\\\\', ':customer:42', ': customer:42']
    """
    if kind in ENCODED:
        return [f'"{b64encode(subject.encode()).decode()}"' for subject in subjects]
    plain = [f'"{subject}"' for subject in subjects]
    return [*plain, "\\", *(f"{colon}{subject}" for subject in subjects for colon in (":", ": "))]


def subject_of(headers: str, subjects: Collection[str], kind: ErasurePlace | Blocker) -> str | None:
    """Return the subject in stored headers if it is one of the given subjects.

    >>> subject_of('{"subject": "customer:42"}', ["customer:42"], ErasurePlace.ARCHIVED_EVENT)
    'customer:42'
    """
    # Numbers as they are spelled: one of thousands of digits would be an error.
    found = json.loads(headers, parse_int=str, parse_float=str).get(SUBJECT_HEADER)
    if found is not None and not isinstance(found, str):
        found = json.dumps(found)
    if kind in ENCODED and found is not None:
        found = b64decode(found).decode(errors="replace")
    return found if found in subjects else None


def to_rows(
    rows: Iterable[Mapping[str, Any]], key: Sequence[str], subjects: Collection[str], place: ErasurePlace
) -> list[SubjectRow]:
    """Return the rows of subjects; a row that only has the text of one in another header is left out."""
    found = []
    for row in rows:
        if (subject := subject_of(row["headers"], subjects, place)) is not None:
            identity = tuple(row[name] for name in key)
            found.append(SubjectRow(identity, subject, row["event_type"], row["headers"], bool(row["sealed"])))
    return found


def to_blocking(rows: Iterable[Mapping[str, Any]], subjects: Collection[str], kind: Blocker) -> list[Blocking]:
    """Return the rows that stand in the way; a row that only has the text of a subject elsewhere is left out."""
    return [
        Blocking(kind, row["id"], row["name"], row["place"], row.get("consumer") or "", row.get("headers") or "{}")
        for row in rows
        if kind is Blocker.SAGA or subject_of(row["headers"], subjects, kind) is not None
    ]


def to_run(row: Sequence[Any]) -> ErasureRun:
    """Return a run from its columns; counts and receipt are text."""
    run_id, hash, actor, started_at, finished_at, counts, receipt = row
    known = None if receipt is None else json.loads(receipt)
    return ErasureRun(run_id, hash, actor, started_at, finished_at, json.loads(counts), known)


def hashes_of(subjects: Iterable[str]) -> dict[str, str]:
    """Return the subjects by their hashes."""
    return {subject_hash(subject): subject for subject in subjects}


def by_run(rows: Iterable[Replacement], runs: Runs) -> dict[Any, list[Replacement]]:
    """Group rows by the run of their subject."""
    found = defaultdict(list)
    for each in rows:
        found[runs[each.row.subject]].append(each)
    return found


def open_counts(counts: str | None) -> str:
    """Return the counts of an open run. Without it, another process has finished the run."""
    if counts is None:
        raise Permanent("there is no open run of the erasure: another process has finished it; run the command again")
    return counts


def counted(counts: str, place: ErasurePlace, rows: Sequence[Replacement]) -> str:
    """Return the counts of a run, as text, after rows of a place were erased."""
    readable = [each.row.name for each in rows if place is ErasurePlace.ARCHIVED_EVENT and not each.row.sealed]
    return add_counts(counts, {place: len(rows)}, readable)
