"""Operations on MongoDB as generators, run through a session of the caller, synchronous or asynchronous."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from outrider.stores.mongo.database import collection
from outrider.stores.statements import run_statements, run_statements_async

T = TypeVar("T")


class Operation(NamedTuple):
    """One operation: a method of a collection with its arguments. The result of a query is a list."""

    collection: str
    method: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = {}


TRANSACTION = Operation("", "transaction_name", ())
"""The request for the name of the transaction in which the operations run."""


Operations = Generator[Operation, Any, T]
"""A generator of operations with a result of type T."""


def operation(name: str, method: str, *args: Any, **options: Any) -> Operation:
    """Return an operation.

    >>> operation("outbox", "find", {"lane": 3}, limit=1).options
    {'limit': 1}
    """
    return Operation(name, method, args, options)


def run_operations(work: Operations[T], session: Any, schema: str) -> T:
    """Run operations through a synchronous session."""

    def execute(requested: Operation) -> Any:
        if requested is TRANSACTION:
            return transaction_name(session)
        found = _call(requested, session, schema)
        return list(found) if requested.method in _LISTED else found

    return run_statements(work, execute)


async def run_operations_async(work: Operations[T], session: Any, schema: str) -> T:
    """Run operations through an asynchronous session."""

    async def execute(requested: Operation) -> Any:
        if requested is TRANSACTION:
            return transaction_name(session)
        found = _call(requested, session, schema)
        if requested.method != "find":
            found = await found
        return await found.to_list() if requested.method in _LISTED else found

    return await run_statements_async(work, execute)


def transaction_name(session: Any) -> str:
    """Return the session and the number of its transaction, which are lsid and txnNumber in the log of the server."""
    return f"{session.session_id['id'].as_uuid()}:{session._transaction_id}"


_LISTED = ("find", "aggregate")


def _call(requested: Operation, session: Any, schema: str) -> Any:
    target = collection(session.client, schema, requested.collection)
    return getattr(target, requested.method)(*requested.args, session=session, **requested.options)
