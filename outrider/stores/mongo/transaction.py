"""The transaction that a handler works in: a session of the driver's own kind, and errors told apart.

What is raised inside the block passes through as it is: it is the handler's. What goes wrong at the commit is the
store's, and comes in our words. MongoDB lets nobody wait for a document that another transaction has written; so the
first work of a transaction, behind which nothing can be lost, is done again until it gets its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar
from weakref import WeakSet

from pymongo.errors import OperationFailure, PyMongoError

from outrider.errors import TransactionLost, UnfitHandler
from outrider.stores.lending import ENDED
from outrider.stores.mongo.calling import told
from outrider.stores.mongo.database import Database, Patience, Session, abort, begin, commit
from outrider.stores.mongo.errors import passing

T = TypeVar("T")

COMMIT_SECONDS = 60.0
ABORT_SECONDS = 5.0
WRITE_CONFLICT = 112

_LENT: WeakSet[Session] = WeakSet()
_SEVERED: WeakSet[Session] = WeakSet()


@asynccontextmanager
async def handling(database: Database) -> AsyncIterator[Session]:
    """Lend a session with a transaction open; commit when the block ends, roll back when it raises."""
    async with database.client.start_session() as session:
        _LENT.add(session)
        await begin(session)
        try:
            yield session
        except BaseException:
            await undo(session)
            raise
        if session in _SEVERED:
            await undo(session)
            raise TransactionLost("a function did not end in time; what it did in its transaction was undone")
        if not session.in_transaction:
            raise UnfitHandler(ENDED)
        with told(database.where):
            async with asyncio.timeout(COMMIT_SECONDS):
                await commit(session, Patience())


def sever(session: Session) -> None:
    """Never commit what is done in a session. When it has ended, whoever still has it cannot use it any more."""
    _SEVERED.add(session)


async def undo(session: Session) -> None:
    """Roll back. Where that takes too long, the server does it by itself; the block's own error is what is told."""
    with suppress(TimeoutError, PyMongoError):
        async with asyncio.timeout(ABORT_SECONDS):
            await abort(session)


def ours(session: Session) -> bool:
    """Tell whether it is we who have lent a session, so that its transaction is ours to begin anew."""
    return session in _LENT


def untouched(session: Session) -> bool:
    """Tell whether nothing has been asked of the server yet in a session of ours, so that nothing can be lost of it."""
    return ours(session) and session.operation_time is None


async def in_turn(session: Session, work: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Do the first work of a transaction; where another one stands in the way, wait and do it in a new one.

    Whatever comes later is done once: what went before it would be lost.
    """
    first = untouched(session)
    while True:
        try:
            return await work()
        except PyMongoError as error:
            if not first or not passing(error):
                raise
            await anew(session)
            await patience.pause(error)


async def anew(session: Session) -> None:
    """Give up a transaction in which nothing was done, and begin another one."""
    await abort(session)
    await begin(session)


def conflict(error: BaseException | None) -> bool:
    """Tell whether another transaction has written the same document."""
    return isinstance(error, OperationFailure) and error.code == WRITE_CONFLICT
