"""The parameters of the sagas' statements. Pure; the store or a driver executes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.saga_store import Claim, NewMail, NewSaga, Turn
from outrider.stores.saga_rows import Sheet, entry_row

ENTRY_COLUMNS = 10
NOTE_COLUMNS = 6


def start_parameters(saga: NewSaga) -> list[Any]:
    """Return the parameters of `start`."""
    *name, state, traceparent, outline = saga
    return [*name, state.decode(), traceparent, outline]


def post_parameters(mail: Sequence[NewMail]) -> list[list[Any]]:
    """Return the arrays of `post`, one per column."""
    rows = [(*piece[:4], piece.body.decode(), piece.event_id, piece.saga_type) for piece in mail]
    return _columns(rows, len(NewMail._fields))


def save_parameters(claim: Claim, turn: Turn, lease_seconds: float) -> list[Any]:
    """Return the parameters of `save`: the fence, the instance, the journal, the mail, the notes."""
    sheet = Sheet.of(turn, lease_seconds)
    to = sheet.instance
    return [
        *(claim.saga_id, claim.worker, claim.epoch, to.version),
        *(to.state.decode(), to.status, to.current_step, sheet.last_error, to.retry_count, to.needs_attention),
        *(turn.release, sheet.due_seconds),
        *_columns([entry_row(entry) for entry in sheet.entries], ENTRY_COLUMNS),
        *(sheet.taken, sheet.seen),
        *_columns(sheet.notes, NOTE_COLUMNS),
    ]


def _columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """Return rows as columns; as many empty ones where there are no rows."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
