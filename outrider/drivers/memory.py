"""Staging and saga operations through a transaction of the memory store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from outrider.errors import NotInTransaction
from outrider.outbox.model import OptimisticClaim, StagedRow, StageRequest
from outrider.saga.model import NewSaga, NewSagaMessage, ParticipantEntry, Phase
from outrider.stores.memory import MemoryTransaction, saga


def run(tx: MemoryTransaction, operation: str, args: tuple[Any, ...], schema: str) -> Awaitable[Any]:
    """Run an operation in the open transaction of the caller; the memory store has no schemas."""
    return OPERATIONS[operation](tx, *args)


async def stage(tx: MemoryTransaction, request: StageRequest, claim: OptimisticClaim | None) -> list[StagedRow]:
    """Stage events in the transaction."""
    _in_transaction(tx)
    return await tx.stage(request, claim)


async def start_saga(tx: MemoryTransaction, new: NewSaga) -> bool:
    """Start a saga in the transaction; return False if the saga exists already::

    async with store.transaction() as tx:
        await start_saga(tx, NewSaga(saga_id, "order", 1, "A-7", b"{}"))
    """
    _in_transaction(tx, "start the saga")
    return await saga.start(tx, new)


async def deliver_messages(tx: MemoryTransaction, messages: Sequence[NewSagaMessage]) -> int:
    """Deliver messages to sagas in the transaction; return how many were new::

    await deliver_messages(tx, [NewSagaMessage(saga_id, MessageKind.REPLY, "stock.reserved", key, b"{}", event_id)])
    """
    _in_transaction(tx)
    return await saga.deliver(tx, messages)


async def participant_enter(tx: MemoryTransaction, participant: str, key: str, phase: Phase) -> ParticipantEntry:
    """Record a command of a participant, or return the recorded outcome of an earlier delivery::

    entered = await participant_enter(tx, "stock", command.headers["saga_key"], Phase.ACTION)
    """
    _in_transaction(tx)
    return await saga.enter(tx, participant, key, phase)


async def participant_save_reply(tx: MemoryTransaction, participant: str, key: str, phase: Phase, reply: bytes) -> None:
    """Store the reply to a command, as JSON::

    await participant_save_reply(tx, "stock", key, Phase.ACTION, b'{"reserved": 3}')
    """
    _in_transaction(tx)
    await saga.save_reply(tx, participant, key, phase, reply)


def _in_transaction(tx: MemoryTransaction, do: str = "stage") -> None:
    if not tx.open:
        raise NotInTransaction(f"this transaction has ended; {do} inside `async with store.transaction() as tx`")


OPERATIONS: Mapping[str, Callable[..., Awaitable[Any]]] = {
    "stage": stage,
    "start_saga": start_saga,
    "deliver_messages": deliver_messages,
    "participant_enter": participant_enter,
    "participant_save_reply": participant_save_reply,
}
