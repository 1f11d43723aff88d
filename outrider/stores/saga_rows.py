"""What the stores share about sagas: rows to nouns, and what a turn writes, in the order of the columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from outrider.saga_store import Entry, Instance, Mail, MailKind, Note, Phase, Progress, Status, Turn
from outrider.stores.inbox_rows import clean

AUDIT_FACTS = ("at", "old_status", "new_status", "step", "what", "actor", "detail", "traceparent")

T = TypeVar("T")

STARTED = Note(None, Status.STARTED, None, "started", "application")
"""The first line of every trail."""


def instance_of(row: Sequence[Any]) -> Instance:
    """Return an instance from its columns, in the order of its fields; the state as text."""
    saga_id, saga_type, version, correlation_id, state, status, *rest = row
    return Instance(saga_id, saga_type, version, correlation_id, state.encode(), Status(status), *rest)


def entry_of(row: Sequence[Any]) -> Entry:
    """Return a line of the journal from its columns, in the order of its fields."""
    step, phase, progress, *rest = row
    return Entry(step, Phase(phase), Progress(progress), *rest)


def mail_of(row: Sequence[Any]) -> Mail:
    """Return a piece of mail from its columns, in the order of its fields; the body as text."""
    mail_id, kind, name, key, body, *rest = row
    return Mail(mail_id, MailKind(kind), name, key, body.encode(), *rest)


def by_saga(rows: Iterable[Sequence[Any]]) -> dict[UUID, list[Sequence[Any]]]:
    """Return rows by their first column.

    >>> by_saga([(1, "a"), (2, "b"), (1, "c")])[1]
    [('a',), ('c',)]
    """
    found: dict[UUID, list[Sequence[Any]]] = defaultdict(list)
    for saga_id, *row in rows:
        found[saga_id].append(tuple(row))
    return found


def in_turn(*lines: Sequence[T]) -> list[T]:
    """Return the members of several lines, those at the front of any first, each once.

    >>> in_turn("abc", "xbyz")
    ['a', 'x', 'b', 'c', 'y', 'z']
    """
    rounds = zip_longest(*([(member,) for member in line] for line in lines), fillvalue=())
    return list(dict.fromkeys(member for together in rounds for found in together for member in found))


class Sheet(NamedTuple):
    """A turn as it is written: each line of the journal once, and each piece of mail taken or seen, not both."""

    instance: Instance
    last_error: str | None
    entries: list[Entry]
    taken: list[int]
    seen: list[int]
    notes: list[Note]
    due_seconds: float | None
    """From now on to when it is due, or the claim ends."""

    @classmethod
    def of(cls, turn: Turn, lease_seconds: float) -> Sheet:
        last = {(e.step, e.phase): replace(e, error=_cleaned(e.error)) for e in turn.entries}
        taken = set(turn.taken)
        return cls(
            turn.instance,
            _cleaned(turn.instance.last_error),
            list(last.values()),
            sorted(taken),
            sorted(set(turn.seen) - taken),
            [_clean_note(note) for note in turn.notes],
            turn.wake_seconds if turn.release else lease_seconds,
        )


def entry_row(entry: Entry) -> tuple[Any, ...]:
    """Return a line of the journal as columns, in the order of its fields."""
    return (
        *(entry.step, entry.phase, entry.progress, entry.place, entry.attempts, entry.due_at, entry.error),
        *(entry.intended_at, entry.ended_at, entry.event_id),
    )


def _clean_note(note: Note) -> Note:
    # Whoever gives an order names himself, and a name can be anything that his terminal lets through.
    return note._replace(what=clean(note.what), actor=clean(note.actor), detail=clean(note.detail))


def _cleaned(text: str | None) -> str | None:
    return None if text is None else clean(text)
