"""Staging and saga operations through a session of pymongo, synchronous or asynchronous.

Transaction and errors belong to the caller: a write conflict passes unchanged with its label, and
`session.with_transaction` repeats the whole transaction. The outbox is in the database that the schema names,
regardless of the application's database.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pymongo.asynchronous.client_session import AsyncClientSession

from outrider.errors import NotInTransaction
from outrider.stores.mongo import saga, staging
from outrider.stores.mongo.operations import Operations, run_operations, run_operations_async

NO_TRANSACTION = (
    "this session is not in a transaction, so event or saga could not share your change's fate; stage in the callback "
    "of `session.with_transaction(...)`, which runs again after a conflict, or inside `session.start_transaction()`"
)

OPERATIONS: dict[str, Callable[..., Operations[Any]]] = {
    "stage": staging.stage,
    "start_saga": saga.start,
    "deliver_messages": saga.deliver,
    "participant_enter": saga.enter,
    "participant_save_reply": saga.save_reply,
}


def run(session: Any, operation: str, args: tuple[Any, ...], schema: str) -> Any:
    """Run an operation in the open transaction of the caller."""
    if not session.in_transaction:
        raise NotInTransaction(NO_TRANSACTION)
    work = OPERATIONS[operation](*args)
    runs = run_operations_async if isinstance(session, AsyncClientSession) else run_operations
    return runs(work, session, schema)
