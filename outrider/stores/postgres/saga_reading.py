"""Sagas read whole: instances with their journals and their mail, all at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from outrider.saga_store import Record
from outrider.stores.saga_rows import by_saga, entry_of, instance_of, mail_of

Run = Callable[..., Awaitable[list[Any]]]
"""Runs a statement by its name, with its parameters."""


async def records(run: Run, rows: Sequence[Any]) -> list[Record]:
    """Return records from rows of instances, each with the time as its last column."""
    if not rows:
        return []
    ids = [row[0] for row in rows]
    journals = by_saga(await run("journals", ids))
    mail = by_saga(await run("mail", ids))
    return [
        Record(
            instance_of(columns),
            tuple(entry_of(entry) for entry in journals[columns[0]]),
            tuple(mail_of(piece) for piece in mail[columns[0]]),
            now,
        )
        for *columns, now in rows
    ]
