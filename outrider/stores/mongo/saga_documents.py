"""Documents of sagas to nouns and back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from bson.int64 import Int64

from outrider.saga_store import ENDED, Entry, Instance, Mail, NewMail, NewSaga, Note, Phase, Status
from outrider.stores.mongo.database import Document, ceiling
from outrider.stores.saga_rows import Sheet, entry_of, entry_row, instance_of, mail_of

DEAF = [Status.COMPLETED.value, Status.COMPENSATED.value]
"""A saga in these reads no mail."""

NUMBER_BITS = 20

INSTANCE = tuple(field.name for field in fields(Instance))[1:]
"""What is kept of an instance, beside its id."""

_ENTRY = tuple(field.name for field in fields(Entry))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Where a process begins is left to chance, so that two that post at the same moment hardly ever choose one number.
_numbers = itertools.count(random.getrandbits(NUMBER_BITS))


def first_number(moment: datetime) -> int:
    """Return a number that is larger than all that were given out for an earlier moment, with room for a million.

    >>> first_number(datetime(1970, 1, 1, second=1, tzinfo=UTC)) == 1000 * 2**20
    True
    """
    return (moment - _EPOCH) // timedelta(milliseconds=1) << NUMBER_BITS


def started(saga: NewSaga, now: datetime) -> Document:
    """Return the document of a new saga, due at once, whose trail has its first line."""
    fresh = {"status": Status.STARTED.value, "version": 0, "retry_count": 0, "needs_attention": False, "epoch": 0}
    known = {name: value for name, value in saga._asdict().items() if name != "saga_id"}
    known["state"] = saga.state.decode()
    times = {"started_at": now, "updated_at": now, "wake_at": now}
    return {"_id": saga.saga_id, **known, **fresh, **times, "owner": None, "turns": 0, "notes": first_number(now)}


def mail_place(saga_id: UUID, event_id: UUID) -> Document:
    """Return what names a piece of mail: the same event is one piece."""
    return {"saga_id": saga_id, "event_id": event_id}


def posted(mail: NewMail, saga: Mapping[str, Any], now: datetime) -> Document:
    """Return the document of a piece of mail to a saga."""
    number = first_number(now) + next(_numbers) % 2**NUMBER_BITS
    return {
        "_id": mail_place(mail.saga_id, mail.event_id),
        "saga_id": mail.saga_id,
        "mail_id": Int64(number),
        "kind": mail.kind.value,
        "name": mail.name,
        "key": mail.key,
        "body": mail.body.decode(),
        "posted_at": now,
        "unseen": True,
        "saga_type": saga["saga_type"],
        "definition_version": saga["definition_version"],
    }


def line(saga_id: UUID, entry: Entry) -> Document:
    """Return the document of a line of the journal. Nothing is due early by rounding."""
    facts = dict(zip(_ENTRY, entry_row(entry), strict=True))
    return {"saga_id": saga_id, **facts, "phase": entry.phase.value, "progress": entry.progress.value} | {
        "due_at": ceiling(entry.due_at)
    }


def noted(saga: Mapping[str, Any], number: int, note: Note, now: datetime) -> Document:
    """Return the document of a line of the audit trail, with the saga's trace."""
    facts = {**note._asdict(), "new_status": note.new_status.value}
    facts["old_status"] = note.old_status and note.old_status.value
    place = {"saga_id": saga["_id"], "number": Int64(number), "at": now}
    return {**place, **facts, "traceparent": saga.get("traceparent")}


def saved(sheet: Sheet, release: bool, now: Any, due_at: Any) -> list[Document]:
    """Return the update that a turn makes to its instance; nothing in it is taken for an expression."""
    to = sheet.instance
    given = {"state": to.state.decode(), "status": to.status.value, "last_error": sheet.last_error}
    given |= {name: getattr(to, name) for name in ("current_step", "retry_count", "needs_attention")}
    change: Document = {name: {"$literal": value} for name, value in given.items()}
    change |= {"version": {"$add": ["$version", 1]}, "notes": {"$add": ["$notes", len(sheet.notes)]}}
    change |= {"updated_at": now, "wake_at": due_at}
    change["ended_at"] = {"$ifNull": ["$ended_at", now]} if to.status in ENDED else None
    if release:
        change["owner"] = None
    return [{"$set": change}]


def barrier_place(participant: str, key: str, phase: Phase) -> Document:
    """Return what names a command at a participant."""
    return {"participant": participant, "key": key, "phase": phase.value}


def to_instance(row: Mapping[str, Any]) -> Instance:
    """Return the instance of a document."""
    return instance_of([row["_id"], *(row.get(name) for name in INSTANCE)])


def to_entry(row: Mapping[str, Any]) -> Entry:
    """Return the line of a document of the journal."""
    return entry_of([row.get(name) for name in _ENTRY])


def to_mail(row: Mapping[str, Any]) -> Mail:
    """Return the piece of mail of a document."""
    known = [row[name] for name in ("mail_id", "kind", "name", "key", "body")]
    return mail_of([*known, row["_id"]["event_id"], row["posted_at"]])
