"""Staging, and what sagas need, through a transaction of the memory store."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import NotInTransaction
from outrider.saga_store import Entered, NewMail, NewSaga, Phase
from outrider.store import Drafts, Hold, Placed
from outrider.stores.memory import MemoryTransaction, saga_writing


async def stage(tx: MemoryTransaction, drafts: Drafts, hold: Hold | None, schema: str) -> list[Placed]:
    """Stage into the transaction; the memory store has no schemas."""
    _in_transaction(tx)
    return await tx.stage(drafts, hold)


async def start_saga(tx: MemoryTransaction, new: NewSaga, schema: str) -> bool:
    """Start a saga in the transaction; False if it is there already::

    async with store.transaction() as tx:
        await start_saga(tx, NewSaga(saga_id, "order", 1, "A-7", b"{}"), "")
    """
    _in_transaction(tx, "start the saga")
    return await saga_writing.start(tx, new)


async def post_mail(tx: MemoryTransaction, mail: Sequence[NewMail], schema: str) -> int:
    """Post mail to sagas in the transaction; return how many were new::

    await post_mail(tx, [NewMail(saga_id, MailKind.REPLY, "stock.reserved", key, b"{}", event_id)], "")
    """
    _in_transaction(tx)
    return await saga_writing.post(tx, mail)


async def barrier_enter(tx: MemoryTransaction, participant: str, key: str, phase: Phase, schema: str) -> Entered:
    """Let a command through a participant's barrier, or say what became of it before::

    entered = await barrier_enter(tx, "stock", command.headers["saga_key"], Phase.ACTION, "")
    """
    _in_transaction(tx)
    return await saga_writing.enter(tx, participant, key, phase)


async def barrier_keep(  # noqa: PLR0917 - every driver takes the same, in the same order
    tx: MemoryTransaction, participant: str, key: str, phase: Phase, reply: bytes, schema: str
) -> None:
    """Keep what was answered to a command, as JSON::

    await barrier_keep(tx, "stock", key, Phase.ACTION, b'{"reserved": 3}', "")
    """
    _in_transaction(tx)
    await saga_writing.keep(tx, participant, key, phase, reply)


def _in_transaction(tx: MemoryTransaction, do: str = "stage") -> None:
    if not tx.open:
        raise NotInTransaction(f"this transaction has ended; {do} inside `async with store.transaction() as tx`")
