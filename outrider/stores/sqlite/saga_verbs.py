"""The sagas' verbs on SQLite, inside a transaction that has the whole database locked.

Those that other people's connections run (`start`, `post`, `enter`, `keep`) read back numbers and bytes only, because
their owner may have set any text factory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from outrider.errors import ConcurrencyError
from outrider.saga_store import (
    Claim,
    Entered,
    Entry,
    Instance,
    Mail,
    NewMail,
    NewSaga,
    Note,
    Phase,
    Record,
    Turn,
    Undelivered,
)
from outrider.stores.saga_rows import STARTED, Sheet, entry_of, entry_row, in_turn, instance_of, mail_of
from outrider.stores.sqlite.rows import load as load_sql
from outrider.stores.sqlite.rows import to_moment, to_seconds

SQL = load_sql("saga.sql")

Definitions = Collection[tuple[str, int]]


def start(cursor: sqlite3.Cursor, saga: NewSaga, now: float) -> bool:
    """Insert an instance that is due at once, and the first line of its trail."""
    facts = {**saga._asdict(), "saga_id": str(saga.saga_id), "state": saga.state.decode(), "now": now}
    if not cursor.execute(SQL["start"], facts).rowcount:
        return False
    _note(cursor, saga.saga_id, STARTED, now)
    return True


def post(cursor: sqlite3.Cursor, mail: Sequence[NewMail], now: float) -> int:
    """Put mail into boxes; return how many were new."""
    rows = [
        {**piece._asdict(), "saga_id": str(piece.saga_id), "event_id": str(piece.event_id), "now": now}
        | {"body": piece.body.decode()}
        for piece in sorted(mail, key=lambda piece: (piece.saga_id, piece.event_id))
    ]
    return sum(cursor.execute(SQL["post"], row).rowcount for row in rows)


def candidates(cursor: sqlite3.Cursor, definitions: Definitions, limit: int, now: float) -> list[str]:
    """Return what may be claimed: the two kinds in turn, so neither waits for the end of the other."""
    due = _first(cursor, "due", definitions, limit, now)
    mailed = _first(cursor, "mailed", definitions, limit, now)
    return in_turn(due, mailed)[:limit]


def claim(
    cursor: sqlite3.Cursor, worker: str, definitions: Definitions, *, limit: int, lease_seconds: float, now: float
) -> list[Record]:
    """Take instances, and read them whole."""
    chosen = candidates(cursor, definitions, limit, now)
    for saga_id in chosen:
        cursor.execute(SQL["take"], {"worker": worker, "until": now + lease_seconds, "saga_id": saga_id})
    return [record for saga_id in chosen if (record := load(cursor, UUID(saga_id), now))]


def renew(cursor: sqlite3.Cursor, claims: Sequence[Claim], until: float) -> frozenset[UUID]:
    """Move the end of claims ahead; return those that are still held."""
    return frozenset(
        held.saga_id for held in claims if cursor.execute(SQL["renew"], {**_fence(held), "until": until}).rowcount
    )


def load(cursor: sqlite3.Cursor, saga_id: UUID, now: float) -> Record | None:
    """Return all that is known of a saga."""
    facts = {"saga_id": str(saga_id)}
    row = cursor.execute(SQL["load"], facts).fetchone()
    if row is None:
        return None
    journal = tuple(_entry(columns) for columns in cursor.execute(SQL["journal"], facts).fetchall())
    mail = tuple(_mail(columns) for columns in cursor.execute(SQL["mail"], facts).fetchall())
    return Record(to_instance(row), journal, mail, datetime.fromtimestamp(now, UTC))


def save(cursor: sqlite3.Cursor, held: Claim, turn: Turn, lease_seconds: float, now: float) -> None:
    """Write a turn, or nothing of it."""
    sheet = Sheet.of(turn, lease_seconds)
    to = sheet.instance
    facts = {name: getattr(to, name) for name in ("version", "status", "current_step", "retry_count")}
    facts |= {"state": to.state.decode(), "last_error": sheet.last_error, "needs_attention": to.needs_attention}
    facts |= {"release": turn.release, "due_seconds": sheet.due_seconds, "now": now, **_fence(held)}
    if not cursor.execute(SQL["save"], facts).rowcount:
        raise ConcurrencyError(
            f"saga {held.saga_id} has another owner or version by now; nothing was written: claim it again"
        )
    saga_id = str(held.saga_id)
    cursor.executemany(SQL["enter_journal"], [(saga_id, *_plain(entry_row(entry))) for entry in sheet.entries])
    cursor.executemany(SQL["take_mail"], [(mail_id, saga_id) for mail_id in sheet.taken])
    cursor.executemany(SQL["mark_mail"], [(mail_id, saga_id) for mail_id in sheet.seen])
    for note in sheet.notes:
        _note(cursor, held.saga_id, note, now)


def undelivered(cursor: sqlite3.Cursor, event_ids: Sequence[UUID]) -> dict[UUID, Undelivered]:
    """Return those events that have not left."""
    rows = [
        (UUID(event_id), cursor.execute(SQL["undelivered"], {"event_id": event_id}).fetchone())
        for event_id in map(str, event_ids)
    ]
    return {event_id: Undelivered(row[0]) for event_id, row in rows if row}


def prune_sagas(cursor: sqlite3.Cursor, facts: dict[str, Any]) -> int:
    """Remove sagas that ended long ago, with their journals and mail."""
    old = cursor.execute(SQL["old_sagas"], facts).fetchall()
    for verb in ("remove_journal", "remove_mail", "remove_saga"):
        cursor.executemany(SQL[verb], old)
    return len(old)


def prune_notes(cursor: sqlite3.Cursor, facts: dict[str, Any]) -> int:
    """Remove old lines of the trail."""
    cursor.execute(SQL["allow_pruning"])
    removed = cursor.execute(SQL["prune_notes"], facts).rowcount
    cursor.execute(SQL["forbid_pruning"])
    return removed


def prune_barriers(cursor: sqlite3.Cursor, facts: dict[str, Any]) -> int:
    """Remove what participants need to know no longer."""
    return cursor.execute(SQL["prune_barriers"], facts).rowcount


def drop_strays(cursor: sqlite3.Cursor) -> None:
    """Remove mail that nobody will read."""
    cursor.execute(SQL["drop_strays"])


def enter(cursor: sqlite3.Cursor, participant: str, key: str, phase: Phase, now: float) -> Entered:
    """Let a command through a participant's barrier; a compensation bars its action first, unless that has come."""
    facts = {"participant": participant, "key": key, "phase": phase, "now": now, "barred": False}
    if phase is Phase.COMPENSATION:
        barring = {**facts, "phase": Phase.ACTION, "barred": True}
        facts["barred"] = bool(cursor.execute(SQL["enter_barrier"], barring).rowcount)
    if cursor.execute(SQL["enter_barrier"], facts).rowcount:
        return Entered(True, bool(facts["barred"]))
    barred, reply = cursor.execute(SQL["answered"], facts).fetchone()
    return Entered(False, bool(barred), reply)


def keep(cursor: sqlite3.Cursor, participant: str, key: str, phase: Phase, reply: bytes) -> None:
    """Keep what was answered."""
    facts = {"participant": participant, "key": key, "phase": phase, "reply": reply.decode()}
    cursor.execute(SQL["keep"], facts)


def to_instance(row: Sequence[Any]) -> Instance:
    """Return the instance of a row selected with the shared column list."""
    cells = list(row)
    cells[0], cells[10] = UUID(cells[0]), bool(cells[10])
    cells[12:16] = [to_moment(seconds) for seconds in cells[12:16]]
    return instance_of(cells)


def _entry(row: Sequence[Any]) -> Entry:
    *known, due_at, error, intended_at, ended_at, event_id = row
    times = to_moment(intended_at), to_moment(ended_at)
    return entry_of([*known, to_moment(due_at), error, *times, UUID(event_id) if event_id else None])


def _mail(row: Sequence[Any]) -> Mail:
    *known, event_id, posted_at = row
    return mail_of([*known, UUID(event_id), to_moment(posted_at)])


def _plain(row: Sequence[Any]) -> list[Any]:
    texts = [str(cell) if isinstance(cell, UUID) else cell for cell in row]
    return [to_seconds(cell) if isinstance(cell, datetime) else cell for cell in texts]


def _fence(held: Claim) -> dict[str, Any]:
    return {"worker": held.worker, "saga_id": str(held.saga_id), "epoch": held.epoch}


def _first(cursor: sqlite3.Cursor, verb: str, definitions: Definitions, limit: int, now: float) -> list[str]:
    """Return the first sagas of all definitions, each once."""
    found: list[tuple[float, str]] = []
    for saga_type, version in set(definitions):
        facts = {"saga_type": saga_type, "definition_version": version, "limit": limit, "now": now}
        found += cursor.execute(SQL[verb], facts).fetchall()
    return list(dict.fromkeys(saga_id for _, saga_id in sorted(found)))


def _note(cursor: sqlite3.Cursor, saga_id: UUID, note: Note, now: float) -> None:
    cursor.execute(SQL["note"], {**note._asdict(), "saga_id": str(saga_id), "now": now})
