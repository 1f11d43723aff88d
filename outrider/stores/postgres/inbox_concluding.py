"""Concluding in PostgreSQL: what is written when the handlers are done. Nearly always one statement.

Rows first, streams last. A dead letter is parked and then buried from there, so that it has a place among those that
wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from outrider.delivery import Arrival, InboxStream
from outrider.inbox_store import Applied, Conclusion, Entry, Standing
from outrider.stores.inbox_rows import Sheet, WaitingRow, check_receipts, failure_text, only_applied, place_of

Known = tuple[InboxStream, Standing]
"""A stream, and where it stands."""

Run = Callable[..., Awaitable[list[Any]]]
"""Runs a statement by its name, with its parameters, in the handler's transaction."""


async def conclude(
    run: Run, consumer: str, entries: Sequence[Entry], standings: Mapping[InboxStream, Standing]
) -> dict[UUID, int]:
    """Write what becomes of arrivals, and where their streams stand; return the ids of dead letters."""
    plain = only_applied(entries)
    known = sorted((stream, at) for stream, at in standings.items() if at != Standing())
    if plain and len(entries) == 1 and len(known) == len(standings) <= 1:
        await _finish_one(run, consumer, *entries[0], known)
        return {}
    sheet = Sheet.of(entries)
    dead_letters = {} if plain else await _write_rows(run, consumer, sheet)
    await _finish_and_stand(run, consumer, sheet, known)
    for stream in sorted(stream for stream, at in standings.items() if at == Standing()):
        await run("forget", consumer, *place_of(stream))
    return dead_letters


async def _finish_one(
    run: Run, consumer: str, arrival: Arrival, conclusion: Conclusion, known: Sequence[Known]
) -> None:
    """Write what one at a time and nearly always has: applied, and counted if there is a gate."""
    assert isinstance(conclusion, Applied)
    receipt = arrival.event_id, conclusion.seconds
    for stream, at in known:
        found = await run("finish_and_stand_one", consumer, *place_of(stream), at.seen, at.cause, 0, *receipt)
        break
    else:
        found = await run("finish_one", consumer, *receipt)
    check_receipts(len(found), 1)


async def _finish_and_stand(run: Run, consumer: str, sheet: Sheet, known: Sequence[Known]) -> None:
    seconds = list(sheet.seconds), list(sheet.seconds.values())
    columns = _columns([(*place_of(stream), at.seen, at.cause, sheet.added[stream]) for stream, at in known])
    if known and sheet.seconds:
        check_receipts(len(await run("finish_and_stand", consumer, *columns, *seconds)), len(sheet.seconds))
    elif known:
        await run("stand", consumer, *columns)
    elif sheet.seconds:
        check_receipts(len(await run("finish", consumer, *seconds)), len(sheet.seconds))


async def _write_rows(run: Run, consumer: str, sheet: Sheet) -> dict[UUID, int]:
    dead_letters: dict[UUID, int] = {}
    if sheet.withdrawn:
        await run("withdraw", consumer, sorted(sheet.withdrawn))
    if sheet.parked:
        await run("park", consumer, *_columns([WaitingRow.of(arrival) for arrival in sheet.parked]))
    if sheet.buried:
        burials = [
            (arrival.event_id, buried.reason, failure_text(buried.failure), buried.policy, buried.attempts)
            for arrival, buried in sheet.buried
        ]
        dead_letters = {row["event_id"]: row["id"] for row in await run("bury", consumer, *_columns(burials))}
    if sheet.left:
        await run("leave", consumer, sheet.left)
    return dead_letters


def _columns(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]
