"""A store that lends its transactions to other people's code: what inbox and sagas have in common.

Its own work is a function over a `Lent`, in a transaction that was lent or in one of its own. It may be called several
times, so it changes nothing but the database. Its first work in a lent transaction waits for its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError

from outrider.clock import Clock
from outrider.errors import Misuse, NotInTransaction, Transient
from outrider.stores.mongo import calling
from outrider.stores.mongo.calling import told
from outrider.stores.mongo.database import Database, Document, Documents, Expression, Patience, Session, collection
from outrider.stores.mongo.errors import passing
from outrider.stores.mongo.schema import installed
from outrider.stores.mongo.transaction import conflict, handling, in_turn, ours, sever, untouched

P = ParamSpec("P")
T = TypeVar("T")

WORK_SECONDS = 60.0
"""How long work of ours may take within a lent transaction, turns that it waits for included."""


class Lent(NamedTuple):
    """A transaction as our own work sees it: the session, and the collections through its client, whosever that is.

    ```python
    async def forget(lent: Lent, event_id: UUID) -> int:
        return (await lent.of("outbox").delete_one({"_id": event_id}, session=lent.session)).deleted_count
    ```
    """

    session: Session
    database: Database

    def of(self, name: str) -> Documents:
        """Return a collection of the store."""
        made: Documents = collection(self.session.client, self.database.schema, name)
        return made

    @property
    def now(self) -> Expression:
        """The present as an expression, for `$expr` and pipelines."""
        return self.database.now


IN_TRANSACTION = "use: async with client.start_session() as session, await session.start_transaction(): ..."

Work = Callable[Concatenate[Lent, P], Awaitable[T]]
"""Our own work in a transaction."""


class Lending:
    """Sessions of a client, and the store's own work in them."""

    WHAT: ClassVar[str]
    """What it is called when it is not installed."""
    VERSION: ClassVar[int]
    """The migration that installs it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    async def open(cls, url: str, *, schema: str = "outrider", clock: Clock | None = None) -> Self:
        """Connect to an installed store; refuse one that is not, and a server without transactions::

        inbox_store = await MongoInbox.open("mongodb://localhost/?replicaSet=rs0")
        """
        database = await Database.open(url, schema, clock=clock)
        try:
            if not await installed(database, cls.VERSION):
                where = f"{database.where}, database {schema}"
                raise Misuse(f"the {cls.WHAT} is not installed in {where}; run: outrider db migrate")
        except BaseException:
            await database.close()
            raise
        return cls(database)

    @classmethod
    def over(cls, client: AsyncMongoClient[Document], *, schema: str = "outrider", clock: Clock | None = None) -> Self:
        """Work through a client of yours, which stays yours to close::

        inbox_store = MongoInbox.over(AsyncMongoClient("mongodb://localhost/?replicaSet=rs0"))
        """
        return cls(Database.over(client, schema, clock=clock))

    def transaction(self) -> AbstractAsyncContextManager[Session]:
        return handling(self._database)

    def lend(self) -> AbstractAsyncContextManager[Session]:
        """Open a transaction for a function that may take its time; connections are made as they are needed."""
        return self.transaction()

    def objection(self, function: Callable[..., Any]) -> str | None:
        return calling.objection(function)

    def sever(self, tx: Session) -> None:
        sever(tx)

    def telling(self, tx: Session) -> AbstractContextManager[None]:
        return told(self._database.where)

    async def call(self, function: Callable[..., Any], argument: Any, tx: Session) -> Any:
        return await calling.call(function, argument, tx)

    async def run(self, tx: Session, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do our own work in a transaction that was lent. If it is the first there, it waits for its turn.

        In a transaction of the application's own nothing is begun anew: its `with_transaction` does that.
        """
        lent = Lent(tx, self._database)
        return await self._run(tx, lambda: work(lent, *args, **kwargs), Patience())

    async def run_unless_taken(self, tx: Session, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Do the first work in a transaction that was lent. None, and nothing done, if another one is at it already."""
        lent, first = Lent(tx, self._database), untouched(tx)
        try:
            return await self._run(tx, lambda: work(lent, *args, **kwargs), Patience(seconds=0))
        except Transient as error:
            if first and conflict(error.__cause__):
                return None
            raise

    async def _run(self, tx: Session, work: Callable[[], Awaitable[T]], patience: Patience) -> T:
        if not ours(tx):
            return await self._as_guest(tx, work)
        with told(self._database.where, after_others=not untouched(tx)):
            async with asyncio.timeout(WORK_SECONDS):
                return await in_turn(tx, work, patience)

    async def _as_guest(self, tx: Session, work: Callable[[], Awaitable[T]]) -> T:
        """Do our own work in a transaction of the application's, which has to hear the server's wish to repeat it."""
        if not isinstance(tx, AsyncClientSession):
            raise Misuse(f"a {type(tx).__name__} is no session of an AsyncMongoClient; {IN_TRANSACTION}")
        if not tx.in_transaction:
            raise NotInTransaction(f"the session is in no transaction; {IN_TRANSACTION}")
        with told(self._database.where):
            try:
                return await work()
            except PyMongoError as error:
                if not passing(error):
                    raise
                repeated = error
        raise repeated

    async def write(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do our own work in a transaction of its own, again from its start where it lost against another one."""

        async def attempt(session: Session) -> T:
            return await work(Lent(session, self._database), *args, **kwargs)

        with told(self._database.where):
            return await self._database.transaction(attempt)

    async def close(self) -> None:
        await self._database.close()
