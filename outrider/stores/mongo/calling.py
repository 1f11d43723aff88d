"""Calling a handler with a session: what it must be, and what has become of its transaction when it is done.

A handler that does not wait for the driver would lose its effects, and its receipt would say that they are there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bson.errors import BSONError
from pymongo.errors import DocumentTooLarge, OperationFailure, PyMongoError

from outrider.errors import Permanent, RaceLost, TransactionLost, Transient, UnfitHandler
from outrider.stores import lending
from outrider.stores.lending import ENDED, promises_to_wait
from outrider.stores.mongo.database import Session
from outrider.stores.mongo.errors import outrun, passing, translated

NOT_ASYNCHRONOUS = (
    "is a plain function, and nobody would wait for what it asks of MongoDB; write it as `async def`, with `await` "
    "before every call, each with session="
)
ABORTED = (
    "the server had ended the transaction before: an error of MongoDB was caught in it, which ends it (look before you "
    "write, and let its errors pass), or it took longer than transactionLifetimeLimitSeconds"
)
LARGE = "a document would be larger than the 16 MB that MongoDB holds; limit the size of messages at the broker"
NO_SUCH_TRANSACTION = 251
TOO_LARGE = 10334


def objection(handler: Callable[..., Any]) -> str | None:
    """Say why a handler cannot work with an asynchronous session; None if it can, or if only a call can tell.

    >>> def bill(event, session): session.client.shop.bills.insert_one({}, session=session)
    >>> objection(bill)[:19]
    'is a plain function'
    """
    return lending.objection(handler) or (None if promises_to_wait(handler) else NOT_ASYNCHRONOUS)


async def call(handler: Callable[..., Any], argument: Any, session: Session) -> Any:
    """Run a handler to its end, and make sure that the transaction is still there; return what it returns."""
    try:
        result = handler(argument, session)
        if not inspect.isawaitable(result):
            raise UnfitHandler(lending.GENERATOR if lending.lazy(result) else NOT_ASYNCHRONOUS)
        return await result
    except Exception as error:
        trouble = _trouble(error)
        if trouble is not None and gone(trouble):
            error.add_note(ABORTED)
        elif trouble is not None:
            lost = RaceLost if outrun(trouble) else TransactionLost
            raise lost(f"the transaction was lost under a handler ({trouble})") from error
        raise
    finally:
        if not session.in_transaction:
            raise UnfitHandler(ENDED)


@contextmanager
def told(where: str, *, after_others: bool = False) -> Iterator[None]:
    """Turn errors of our own steps into ours; after other people's code, tell apart what only that can have caused."""
    try:
        with translated(where):
            try:
                yield
            except (OperationFailure, BSONError) as error:
                if after_others and gone(error):
                    # A handler that has swallowed an error is to be told what it should have done.
                    error.add_note(ABORTED)
                    raise Permanent(f"{where}: {ABORTED}") from error
                if isinstance(error, DocumentTooLarge) or getattr(error, "code", None) == TOO_LARGE:
                    raise Permanent(f"{where}: {LARGE}") from error
                raise
    except TimeoutError as error:
        raise Transient(f"{where} did not answer in time; try again") from error
    except BSONError as error:
        raise Permanent(f"{where}: {type(error).__name__}: {error}") from error


def gone(error: BaseException) -> bool:
    """Tell whether a transaction had ended before, on a server that still knows of it."""
    known = isinstance(error, OperationFailure) and error.code == NO_SUCH_TRANSACTION
    return known and "has been aborted" in str(error)


def _trouble(error: BaseException | None) -> PyMongoError | None:
    """Find what the server or the connection did to the transaction in what a handler has made of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PyMongoError) and passing(error):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
