"""Pages of stored payloads: their keys, and the conversion of rows, the same in every store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from outrider.event import SUBJECT_HEADER, subject_in, subject_problem
from outrider.payload.model import reply_facts
from outrider.privacy.store import CopyKind, CopyPage, PayloadCopy, WrappedKey, WrappedSubjectKey
from outrider.stores.rows import headers_of

BODIES = (CopyKind.HELD_EVENT, CopyKind.CONSUMER_DEAD_LETTER)
"""The kinds whose payload is the body of a message, in bytes."""

OF_SAGAS = (CopyKind.SAGA_STATE, CopyKind.SAGA_JOURNAL)
"""The kinds that belong to a saga, and to no event."""

NAMES: Mapping[CopyKind, tuple[str, ...]] = {
    CopyKind.SAGA_JOURNAL: ("step", "phase"),
    CopyKind.PARTICIPANT_REPLY: ("participant", "key", "phase"),
}
"""The columns beside id and type that are bound to encrypted values."""


KEY_VERBS = {"insert_key": "key_add", "activate_key": "key_rotate", "rewrap_key": "key_rewrap"}
"""The verbs of the operation log, by query."""


class CopyShape(NamedTuple):
    """The middle of the names of a kind's queries, the columns of its key, and the key before the first page."""

    name: str
    key: tuple[str, ...]
    start: tuple[Any, ...]


_NO_ID, _NO_TIME = UUID(int=0), datetime(1, 1, 1, tzinfo=UTC)

SHAPES: Mapping[CopyKind, CopyShape] = {
    CopyKind.EVENT: CopyShape("event", ("event_id",), (_NO_ID,)),
    CopyKind.DEAD_LETTER: CopyShape("dead_letter", ("event_id",), (_NO_ID,)),
    CopyKind.HELD_EVENT: CopyShape("held_event", ("event_id", "consumer"), (_NO_ID, "")),
    CopyKind.CONSUMER_DEAD_LETTER: CopyShape("consumer_dead_letter", ("event_id", "consumer"), (_NO_ID, "")),
    CopyKind.SAGA_MESSAGE: CopyShape("saga_message", ("saga_id", "event_id"), (_NO_ID, _NO_ID)),
    CopyKind.SAGA_STATE: CopyShape("saga_state", ("saga_id",), (_NO_ID,)),
    CopyKind.SAGA_JOURNAL: CopyShape("saga_journal", ("saga_id", "step", "phase"), (_NO_ID, "", "")),
    CopyKind.PARTICIPANT_REPLY: CopyShape("participant_reply", ("key", "participant", "phase"), ("", "", "")),
    CopyKind.ARCHIVED_EVENT: CopyShape("archived_event", ("event_id", "sent_at"), (_NO_ID, _NO_TIME)),
}
"""The pages of PostgreSQL by kind."""

FILE_SHAPES: Mapping[CopyKind, CopyShape] = {
    **{kind: CopyShape(shape.name, ("event_id",), ("",)) for kind, shape in SHAPES.items()},
    CopyKind.HELD_EVENT: CopyShape("held_event", ("consumer", "event_id"), ("", "")),
    CopyKind.CONSUMER_DEAD_LETTER: CopyShape("consumer_dead_letter", ("consumer", "event_id"), ("", "")),
    CopyKind.SAGA_MESSAGE: CopyShape("saga_message", ("saga_id", "event_id"), ("", "")),
    CopyKind.SAGA_STATE: CopyShape("saga_state", ("saga_id",), ("",)),
    CopyKind.SAGA_JOURNAL: CopyShape("saga_journal", ("saga_id", "step", "phase"), ("", "", "")),
    CopyKind.PARTICIPANT_REPLY: CopyShape("participant_reply", ("participant", "key", "phase"), ("", "", "")),
}
"""The pages of SQLite by kind. Ids are text there, and an archived event has its id for itself."""


def to_copies(kind: CopyKind, rows: Sequence[Mapping[str, Any]], limit: int, key: Sequence[str]) -> CopyPage:
    """Return the page of some rows; a page that is not full is the last one."""
    copies = [_copy(kind, row, key) for row in rows]
    return CopyPage(copies, copies[-1].key if len(copies) == limit else None)


def _copy(kind: CopyKind, row: Mapping[str, Any], key: Sequence[str]) -> PayloadCopy:
    text, names = row["text"], tuple(row[name] for name in NAMES.get(kind, ()))
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            text = None
    if kind is CopyKind.PARTICIPANT_REPLY:
        participant, command_key, phase = names
        event_id = reply_facts(participant, command_key, phase, row).event_id
    else:
        event_id = row["saga_id" if kind in OF_SAGAS else "event_id"]
    own_id = event_id if isinstance(event_id, UUID) else UUID(event_id)
    identity, subject = tuple(row[name] for name in key), _subject(kind, row)
    return PayloadCopy(identity, own_id, row["event_type"] or "", text, subject, names)


def _subject(kind: CopyKind, row: Mapping[str, Any]) -> str | None:
    """Return the subject of a copy; None without one, and for headers that another program wrote wrongly.

    >>> _subject(CopyKind.EVENT, {"headers": '{"subject": "ann"}'}), _subject(CopyKind.EVENT, {"headers": "[]"})
    ('ann', None)
    """
    if kind in OF_SAGAS:
        return row.get("subject")
    subject, headers = None, row.get("headers") or "{}"
    with suppress(ValueError, AttributeError):
        if kind is CopyKind.PARTICIPANT_REPLY:
            subject = reply_facts("", "", "", json.loads(row["text"]).get("reply") or {}).subject
        elif kind in BODIES:
            subject = headers_of(headers).get(SUBJECT_HEADER, b"").decode()
        else:
            subject = subject_in(headers.encode())
    return None if subject is None or subject_problem(subject) else subject


def stored_text(kind: CopyKind, text: str | None) -> str | bytes | None:
    """Return a text as a row of its kind holds it.

    >>> stored_text(CopyKind.HELD_EVENT, "{}")
    b'{}'
    """
    return text.encode() if kind in BODIES and text is not None else text


def to_subject_keys(rows: Sequence[Sequence[Any]]) -> list[WrappedSubjectKey]:
    """Return the keys of subjects of some rows, from their columns."""
    return [WrappedSubjectKey(*row) for row in rows]


def to_keys(rows: Sequence[Sequence[Any]]) -> list[WrappedKey]:
    """Return the keys of some rows, from their columns."""
    return [WrappedKey(*row) for row in rows]
