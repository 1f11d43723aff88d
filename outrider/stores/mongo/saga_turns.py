"""Turns: loading and saving a saga in a transaction that was lent.

The first of them writes the instance, and so keeps everybody else from it until the transaction ends. A claim or
another turn that was written since the transaction began makes the server refuse that first write; it is then done
again in a new transaction, which sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from pymongo import ReplaceOne, ReturnDocument

from outrider.errors import ConcurrencyError
from outrider.saga_store import Claim, Record, Turn
from outrider.stores.mongo.database import Document
from outrider.stores.mongo.lending import Lent
from outrider.stores.mongo.saga_documents import line, noted, saved
from outrider.stores.mongo.saga_reading import facts, read_parts
from outrider.stores.saga_rows import Sheet


async def load(lent: Lent, saga_id: UUID) -> Record | None:
    """Lock a saga, and read it whole; the primary key."""
    # Who only read could not save later: a renewed claim would stand in the way.
    row = await lent.of("saga_instance").find_one_and_update(
        {"_id": saga_id},
        {"$inc": {"turns": 1}},
        facts(lent.now),
        return_document=ReturnDocument.AFTER,
        session=lent.session,
    )
    return (await read_parts(lent.of, lent.session, [saga_id])).record(row) if row else None


async def save(lent: Lent, claim: Claim, turn: Turn, lease_seconds: float) -> datetime:
    """Write a turn, if claim and version are still the ones expected; else nothing of it."""
    sheet = Sheet.of(turn, lease_seconds)
    row = await _save_instance(lent, claim, sheet, turn.release)
    if row is None:
        raise ConcurrencyError(
            f"saga {claim.saga_id} has another owner or version by now; nothing was written: claim it again"
        )
    now: datetime = row["updated_at"]
    await _save_journal(lent, claim.saga_id, sheet)
    await _save_mail(lent, claim.saga_id, sheet)
    first = row["notes"] - len(sheet.notes) + 1
    notes = [noted(row, number, note, now) for number, note in enumerate(sheet.notes, first)]
    if notes:
        await lent.of("saga_audit_log").insert_many(notes, session=lent.session)
    return now


async def _save_instance(lent: Lent, claim: Claim, sheet: Sheet, release: bool) -> Document | None:
    """The primary key."""
    fence = {"_id": claim.saga_id, "owner": claim.worker, "epoch": claim.epoch, "version": sheet.instance.version}
    due_at = None if sheet.due_seconds is None else lent.database.after(sheet.due_seconds)
    return await lent.of("saga_instance").find_one_and_update(
        fence,
        saved(sheet, release, lent.now, due_at),
        {"updated_at": 1, "notes": 1, "traceparent": 1},
        return_document=ReturnDocument.AFTER,
        session=lent.session,
    )


async def _save_journal(lent: Lent, saga_id: UUID, sheet: Sheet) -> None:
    """Each line replaces the one before; saga_step_line."""
    lines = [line(saga_id, entry) for entry in sheet.entries]
    places = [{name: each[name] for name in ("saga_id", "step", "phase")} for each in lines]
    writes = [ReplaceOne(place, each, upsert=True) for place, each in zip(places, lines, strict=True)]
    if writes:
        await lent.of("saga_step").bulk_write(writes, session=lent.session)


async def _save_mail(lent: Lent, saga_id: UUID, sheet: Sheet) -> None:
    """What is taken goes, and what is seen wakes nobody again; saga_mailbox_order."""
    box = lent.of("saga_mailbox")
    if sheet.taken:
        await box.delete_many(_pieces(saga_id, sheet.taken), session=lent.session)
    if sheet.seen:
        await box.update_many(_pieces(saga_id, sheet.seen), {"$unset": {"unseen": ""}}, session=lent.session)


def _pieces(saga_id: UUID, numbers: Sequence[int]) -> Document:
    return {"saga_id": saga_id, "mail_id": {"$in": list(numbers)}}
