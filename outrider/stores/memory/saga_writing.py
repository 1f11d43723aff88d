"""What is written of sagas inside a memory transaction: by the store, and through the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from outrider.errors import ConcurrencyError
from outrider.saga_store import ENDED, Claim, Entered, Instance, Mail, NewMail, NewSaga, Note, Phase, Status, Turn
from outrider.stores.memory.saga_tables import Passage, Passages, SagaRow
from outrider.stores.memory.transaction import MemoryTransaction
from outrider.stores.saga_rows import AUDIT_FACTS, STARTED, Sheet


async def start(tx: MemoryTransaction, saga: NewSaga) -> bool:
    """Insert an instance that is due at once; False if it is there already."""
    tables, now = tx.store.sagas, tx.store.clock.now()
    name = saga.saga_type, saga.correlation_id
    await tx.lock(("saga_name", name))
    await tx.lock(("saga", saga.saga_id))
    if tables.names.seen_by(tx, name) or tables.sagas.seen_by(tx, saga.saga_id).instance:
        return False
    times = now, now, None, now
    instance = Instance(
        *saga[:5], Status.STARTED, None, 0, None, 0, False, saga.traceparent, *times, None, 0, saga.outline
    )

    def insert(row: SagaRow) -> None:
        row.instance = instance
        _note(row, STARTED, now)

    tables.sagas.write(tx, saga.saga_id, insert)
    tables.names.write(tx, name, lambda ids: ids.add(saga.saga_id))
    tx.on_commit.append(tables.wake)
    return True


async def post(tx: MemoryTransaction, mail: Sequence[NewMail]) -> int:
    """Put mail into boxes; return how many were new."""
    tables, fresh = tx.store.sagas, 0
    for piece in sorted(mail, key=lambda piece: (piece.saga_id, piece.event_id)):
        await tx.lock(("saga_mail", piece.saga_id, piece.event_id))
        row = tables.sagas.seen_by(tx, piece.saga_id)
        if _meant(row, piece) and piece.event_id not in {known.event_id for known in row.mail.values()}:
            made = Mail(tables.next_number(), *piece[1:6], tx.store.clock.now())
            tables.sagas.write(tx, piece.saga_id, partial(_deliver, made))
            fresh += 1
    if fresh:
        tx.on_commit.append(tables.wake)
    return fresh


def _meant(row: SagaRow, piece: NewMail) -> bool:
    return row.listens and row.instance is not None and piece.saga_type in (None, row.instance.saga_type)


def _deliver(mail: Mail, row: SagaRow) -> None:
    row.mail[mail.mail_id] = mail


async def save(tx: MemoryTransaction, claim: Claim, turn: Turn, lease_seconds: float) -> datetime:
    """Write a turn, or nothing of it."""
    tables, now = tx.store.sagas, tx.store.clock.now()
    await tx.lock(("saga", claim.saga_id))
    known = tables.sagas.seen_by(tx, claim.saga_id).instance
    expected = claim.worker, claim.epoch, turn.instance.version
    if known is None or (known.owner, known.epoch, known.version) != expected:
        raise ConcurrencyError(
            f"saga {claim.saga_id} has another owner or version by now; nothing was written: claim it again"
        )
    sheet = Sheet.of(turn, lease_seconds)
    saved = _saved(known, sheet, turn.release, now)

    def apply(row: SagaRow) -> None:
        row.instance = saved
        row.journal.update({(entry.step, entry.phase): entry for entry in sheet.entries})
        row.mail = {mail_id: mail for mail_id, mail in row.mail.items() if mail_id not in sheet.taken}
        row.seen |= row.mail.keys() & set(sheet.seen)
        for note in sheet.notes:
            _note(row, note, now)

    tables.sagas.write(tx, claim.saga_id, apply)
    return now


def _saved(known: Instance, sheet: Sheet, release: bool, now: datetime) -> Instance:
    to, due = sheet.instance, sheet.due_seconds
    return replace(
        known,
        state=to.state,
        status=to.status,
        current_step=to.current_step,
        version=known.version + 1,
        last_error=sheet.last_error,
        retry_count=to.retry_count,
        needs_attention=to.needs_attention,
        updated_at=now,
        ended_at=(known.ended_at or now) if to.status in ENDED else None,
        owner=None if release else known.owner,
        wake_at=None if due is None else now + timedelta(seconds=due),
    )


def _note(row: SagaRow, note: Note, now: datetime) -> None:
    assert row.instance is not None, "a trail begins with its saga"
    line = now, *note, row.instance.traceparent
    row.trail.append(dict(zip(AUDIT_FACTS, line, strict=True)))


async def enter(tx: MemoryTransaction, participant: str, key: str, phase: Phase) -> Entered:
    """Let a command through a participant's barrier; a compensation bars its action first, unless that has come."""
    table, now = tx.store.sagas.barriers, tx.store.clock.now()
    await tx.lock(("saga_barrier", participant, key))
    known = table.seen_by(tx, (participant, key))
    if before := known.get(phase):
        return Entered(False, before.barred, before.reply)
    barred = phase is Phase.COMPENSATION and Phase.ACTION not in known
    came = {phase: Passage(barred, now)}
    if barred:
        came[Phase.ACTION] = Passage(True, now)
    table.write(tx, (participant, key), lambda passages: passages.update(came))
    return Entered(True, barred)


async def keep(tx: MemoryTransaction, participant: str, key: str, phase: Phase, reply: bytes) -> None:
    """Keep what was answered."""

    def answer(passages: Passages) -> None:
        passages[phase] = passages[phase]._replace(reply=reply)

    tx.store.sagas.barriers.write(tx, (participant, key), answer)
