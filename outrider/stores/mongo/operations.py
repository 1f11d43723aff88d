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
    verb: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = {}


Steps = Generator[Operation, Any, T]
"""A generator of operations with a result of type T."""


def step(name: str, verb: str, *args: Any, **options: Any) -> Operation:
    """Return an operation.

    >>> step("outbox", "find", {"lane": 3}, limit=1).options
    {'limit': 1}
    """
    return Operation(name, verb, args, options)


def run_operations(work: Steps[T], session: Any, schema: str) -> T:
    """Run operations through a synchronous session."""

    def execute(asked: Operation) -> Any:
        found = _call(asked, session, schema)
        return list(found) if asked.verb in _LISTED else found

    return run_statements(work, execute)


async def run_operations_async(work: Steps[T], session: Any, schema: str) -> T:
    """Run operations through an asynchronous session."""

    async def execute(asked: Operation) -> Any:
        found = _call(asked, session, schema)
        if asked.verb != "find":
            found = await found
        return await found.to_list() if asked.verb in _LISTED else found

    return await run_statements_async(work, execute)


_LISTED = ("find", "aggregate")


def _call(asked: Operation, session: Any, schema: str) -> Any:
    place = collection(session.client, schema, asked.collection)
    return getattr(place, asked.verb)(*asked.args, session=session, **asked.options)
