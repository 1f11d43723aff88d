"""Handler transactions on sessions of pymongo, for the inbox and the saga store of MongoDB.

Work of a store is a function over a `MongoHandlerTransaction`. The function may be called several times, so it changes
only the database. The first work in a transaction waits until other writers of the same documents have ended.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from bson.errors import BSONError
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import DocumentTooLarge, OperationFailure, PyMongoError

from outrider import handler_transactions
from outrider.clock import Clock
from outrider.errors import (
    InvalidHandler,
    NotInTransaction,
    Permanent,
    TransactionLost,
    Transient,
    UsageError,
    WriteConflict,
)
from outrider.handler_transactions import TRANSACTION_ENDED, HandlerTransaction, returns_awaitable
from outrider.redaction import without_values
from outrider.stores.mongo.database import (
    Documents,
    Expression,
    MongoDatabase,
    RetryBudget,
    Session,
    abort,
    begin,
    collection,
    commit,
    is_transient,
    outrun,
    translated,
)
from outrider.stores.mongo.schema import check_installed_version, installed

P = ParamSpec("P")

T = TypeVar("T")

IN_TRANSACTION = "use: async with client.start_session() as session, await session.start_transaction(): ..."

WORK_SECONDS = 60.0
"""The time limit of store work within a handler transaction, including the wait for other transactions."""

NOT_ASYNCHRONOUS = (
    "is a plain function, so its calls to MongoDB would not be awaited; write it as `async def`, with `await` "
    "before every call, each with session="
)

ABORTED = (
    "the server had ended the transaction before: an error of MongoDB was caught in it, which ends it (look before you "
    "write, and let its errors pass), or it took longer than transactionLifetimeLimitSeconds"
)

LARGE = "a document would be larger than the 16 MB that MongoDB holds; limit the size of messages at the broker"

NO_SUCH_TRANSACTION = 251

TOO_LARGE = 10334

COMMIT_SECONDS = 60.0

ABORT_SECONDS = 5.0

WRITE_CONFLICT = 112


class MongoHandlerTransaction(HandlerTransaction):
    """A transaction of a session. Store work reaches the collections through the client of the session.

    ```python
    async def forget(tx: MongoHandlerTransaction, event_id: UUID) -> int:
        return (await tx.of("outbox").delete_one({"_id": event_id}, session=tx.session)).deleted_count
    ```
    """

    def __init__(self, session: Session, database: MongoDatabase) -> None:
        self.connection = self.session = session
        self.database = database
        self.aborted = False
        """Whether a commit is no longer possible."""

    def of(self, name: str) -> Documents:
        """Return a collection of the store."""
        made: Documents = collection(self.session.client, self.database.schema, name)
        return made

    @property
    def now(self) -> Expression:
        """The current time as an expression for `$expr` and pipelines."""
        return self.database.now

    @property
    def untouched(self) -> bool:
        """Whether the transaction has sent no command yet, so that a new transaction can replace it."""
        return self.session.operation_time is None

    async def execute(self, *statement: Any) -> Any:
        """Run work of the store."""
        work, *args = statement
        return await self.run(work, *args)

    async def run(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work of the store. The first work in the transaction waits for other writers."""
        return await self._run(lambda: work(self, *args, **kwargs), RetryBudget())

    async def run_unless_taken(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run the first work in the transaction.

        Return None, without effect, if another transaction holds the documents.
        """
        first = self.untouched
        try:
            return await self._run(lambda: work(self, *args, **kwargs), RetryBudget(seconds=0))
        except Transient as error:
            if first and conflict(error.__cause__):
                return None
            raise

    async def _run(self, work: Callable[[], Awaitable[T]], budget: RetryBudget) -> T:
        first = self.untouched
        with translate_errors(self.database.where, after_others=not first):
            async with asyncio.timeout(WORK_SECONDS):
                while True:
                    try:
                        return await work()
                    except PyMongoError as error:
                        # Later work has no retry: a retry would lose the work before it.
                        if not first or not is_transient(error):
                            raise
                        await abort(self.session)
                        await begin(self.session)
                        await budget.pause(error)

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        try:
            result = function(argument, self.session)
            if not inspect.isawaitable(result):
                raise InvalidHandler(
                    handler_transactions.GENERATOR if handler_transactions.lazy(result) else NOT_ASYNCHRONOUS
                )
            return await result
        except Exception as error:
            error_text = _error(error)
            if error_text is not None and is_lost(error_text):
                error.add_note(ABORTED)
            elif error_text is not None:
                lost = WriteConflict if outrun(error_text) else TransactionLost
                raise lost(f"the transaction was lost under a handler ({error_text})") from error
            raise
        finally:
            if not self.session.in_transaction:
                raise InvalidHandler(TRANSACTION_ENDED)

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        with translate_errors(self.database.where):
            return await function(self.session, *args)

    def abort(self) -> None:
        # A function that still has the session cannot use the session after its end.
        self.aborted = True


class GuestTransaction(MongoHandlerTransaction):
    """A transaction of a session of the application. The application retries the transaction by itself."""

    def __init__(self, session: Session, database: MongoDatabase) -> None:
        if not isinstance(session, AsyncClientSession):
            raise UsageError(f"a {type(session).__name__} is no session of an AsyncMongoClient; {IN_TRANSACTION}")
        if not session.in_transaction:
            raise NotInTransaction(f"the session is in no transaction; {IN_TRANSACTION}")
        super().__init__(session, database)

    async def _run(self, work: Callable[[], Awaitable[T]], budget: RetryBudget) -> T:
        with translate_errors(self.database.where):
            try:
                return await work()
            except PyMongoError as error:
                if not is_transient(error):
                    raise
                repeated = error
        raise repeated


Work = Callable[Concatenate[MongoHandlerTransaction, P], Awaitable[T]]
"""Work of the store in a transaction."""


class MongoTransactionSource:
    """A source of transactions, each with its own session. The client opens connections as needed."""

    vendor = "mongodb"

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MongoHandlerTransaction]:
        """Open a transaction. The block commits at its end and rolls back after an exception."""
        async with self._database.client.start_session() as session:
            tx = MongoHandlerTransaction(session, self._database)
            await begin(session)
            try:
                yield tx
            except BaseException:
                await _rollback(session)
                raise
            if tx.aborted:
                await _rollback(session)
                raise TransactionLost("a function did not end in time; what it did in its transaction was undone")
            if not session.in_transaction:
                raise InvalidHandler(TRANSACTION_ENDED)
            with translate_errors(self._database.where):
                async with asyncio.timeout(COMMIT_SECONDS):
                    await commit(session, RetryBudget())

    async def write(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run store work in a separate transaction, with a retry from the start after a write conflict."""

        async def attempt(session: Session) -> T:
            return await work(MongoHandlerTransaction(session, self._database), *args, **kwargs)

        with translate_errors(self._database.where):
            return await self._database.transaction(attempt)

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        return check_handler(function)

    async def close(self) -> None:
        """Do nothing: the store closes the database."""


async def open_installed(url: str, schema: str, *, what: str, version: int, clock: Clock | None) -> MongoDatabase:
    """Connect to a database. A server without transactions and a schema that lacks a migration are rejected."""
    database = await MongoDatabase.open(url, schema, clock=clock)
    try:
        if not await installed(database, version):
            where = f"{database.where}, database {schema}"
            raise UsageError(f"the {what} is not installed in {where}; run: outrider db migrate")
        await check_installed_version(database)
    except BaseException:
        await database.close()
        raise
    return database


async def _rollback(session: Session) -> None:
    """Roll back, within a time limit. The server ends a slow one by itself, and the error of the block is raised."""
    with suppress(TimeoutError, PyMongoError):
        async with asyncio.timeout(ABORT_SECONDS):
            await abort(session)


def check_handler(handler: Callable[..., Any]) -> str | None:
    """Return the reason why a handler cannot use an asynchronous session. None: suitable, or only a call can tell.

    >>> def bill(event, session): session.client.shop.bills.insert_one({}, session=session)
    >>> check_handler(bill)[:19]
    'is a plain function'
    """
    return handler_transactions.check_handler(handler) or (None if returns_awaitable(handler) else NOT_ASYNCHRONOUS)


@contextmanager
def translate_errors(where: str, *, after_others: bool = False) -> Iterator[None]:
    """Translate errors of store work. `after_others`: a function of the application ran before in the transaction."""
    try:
        with translated(where):
            try:
                yield
            except (OperationFailure, BSONError) as error:
                if after_others and is_lost(error):
                    # The handler has caught and ignored an error.
                    error.add_note(ABORTED)
                    raise Permanent(f"{where}: {ABORTED}") from error
                if isinstance(error, DocumentTooLarge) or getattr(error, "code", None) == TOO_LARGE:
                    raise Permanent(f"{where}: {LARGE}") from error
                raise
    except TimeoutError as error:
        raise Transient(f"{where} did not answer in time; try again") from error
    except BSONError as error:
        raise Permanent(f"{where}: {type(error).__name__}: {without_values(error)}") from error


def is_lost(error: BaseException) -> bool:
    """Return whether the transaction had already ended on a server that still knows the session."""
    known = isinstance(error, OperationFailure) and error.code == NO_SUCH_TRANSACTION
    return known and "has been aborted" in str(error)


def _error(error: BaseException | None) -> PyMongoError | None:
    """Return the driver error behind an exception of a handler."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PyMongoError) and is_transient(error):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def conflict(error: BaseException | None) -> bool:
    """Return whether another transaction has written the same document."""
    return isinstance(error, OperationFailure) and error.code == WRITE_CONFLICT
