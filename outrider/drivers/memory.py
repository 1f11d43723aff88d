"""Staging through a transaction of the memory store."""

from __future__ import annotations

from outrider.errors import NotInTransaction
from outrider.store import Drafts, Hold, Placed
from outrider.stores.memory import MemoryTransaction


async def stage(tx: MemoryTransaction, drafts: Drafts, hold: Hold | None, schema: str) -> list[Placed]:
    """Stage into the transaction; the memory store has no schemas."""
    if not tx.open:
        raise NotInTransaction("this transaction has ended; stage inside `async with store.transaction() as tx`")
    return await tx.stage(drafts, hold)
