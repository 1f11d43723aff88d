"""The client, sessions and transactions of MongoDB.

A transaction of ours is a function over a session. It reads one snapshot, commits to a majority, and is run again from
its start when the server asks for that, so it must do nothing but talk to the database. All of it is bounded by time.
"""

from __future__ import annotations

import math
import random
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, ReadPreference
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from outrider.clock import Clock
from outrider.errors import Misuse
from outrider.stores.mongo.errors import NOT_INSTALLED, STANDALONE, TOO_OLD, passing, translated, unknown_commit
from outrider.stores.mongo.place import check_url, client_options
from outrider.stores.queries import identifier

P = ParamSpec("P")
T = TypeVar("T")

Document = dict[str, Any]
Session = AsyncClientSession
Documents = AsyncCollection[Document]
Expression = datetime | str

TRANSACTION_SECONDS = 20.0
"""How long a transaction of ours is tried again before it is given up as Transient."""

PAUSE_SECONDS_MAX = 0.25

WIRE_VERSION_MIN = 13
"""What MongoDB 5.0 speaks."""

# Foreign text that is not UTF-8 must not stop its lane; it is delivered with replacement characters.
CODEC: CodecOptions[Document] = CodecOptions(
    tz_aware=True, uuid_representation=UuidRepresentation.STANDARD, unicode_decode_error_handler="replace"
)
MAJORITY = WriteConcern("majority", j=True)


class Database:
    """The collections of one outbox, through one client. `clock` is for tests that own time; else the server's counts.

    ```python
    database = await Database.open("mongodb://localhost/?replicaSet=rs0", "outrider")
    lanes = await database.transaction(read_lanes)  # async def read_lanes(session): ...
    await database.close()
    ```
    """

    def __init__(self, client: AsyncMongoClient[Document], schema: str, where: str, *, clock: Clock | None) -> None:
        self.client, self.schema, self.where = client, identifier(schema), where
        self.clock = clock
        self._ours = False

    @classmethod
    async def open(cls, url: str, schema: str = "outrider", *, clock: Clock | None = None) -> Database:
        """Connect with a client of our own, and refuse a server that cannot keep our promises."""
        where = check_url(url)
        with translated(where):
            database = cls(AsyncMongoClient(url, **client_options(url)), schema, where, clock=clock)
        database._ours = True
        try:
            await database.check()
        except BaseException:
            await database.close()
            raise
        return database

    @classmethod
    def over(
        cls, client: AsyncMongoClient[Document], schema: str = "outrider", *, clock: Clock | None = None
    ) -> Database:
        """Work through a client that somebody else made and will close. `check` says whether its server will do."""
        return cls(client, schema, "MongoDB", clock=clock)

    async def check(self) -> None:
        """Refuse a server without transactions, or without reads of one moment outside of them."""
        with translated(self.where):
            hello = await self.client.admin.command("hello")
        if remedy := objection(hello):
            raise Misuse(f"{self.where}: {remedy}")

    def __getitem__(self, name: str) -> Documents:
        """Return a collection of the outbox; outside of transactions it reads and writes by majority."""
        made: Documents = collection(self.client, self.schema, name)
        return made

    @property
    def now(self) -> Expression:
        """The present as an expression, for `$expr` and pipelines: the server's time, or that of a test's clock."""
        return now_expression(self.clock)

    def after(self, seconds: float) -> Expression | Document:
        """Return the expression for a time from now on, never early by rounding."""
        return {"$add": [self.now, milliseconds(seconds)]}

    def present(self, told: datetime) -> datetime:
        """Return what time it is, having been told by the server: a test's clock knows better."""
        return told if self.clock is None else floor(self.clock.now())

    async def time(self, session: Session | None = None) -> datetime:
        """Ask what time it is, by the database."""
        # A session belongs to its client, which need not be ours.
        client = session.client if session else self.client
        meta: Documents = collection(client, self.schema, "outbox_meta")
        rows = await meta.find({}, {"now": "$$NOW"}, session=session).limit(1).to_list()
        if not rows:
            raise Misuse(f"the outbox is not installed in {self.where}; {NOT_INSTALLED}")
        return self.present(rows[0]["now"])

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Borrow a session, for whoever runs transactions by hand."""
        with translated(self.where):
            async with self.client.start_session() as session:
                yield session

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Session]:
        """Borrow a session in which all reads are of one moment, without a transaction."""
        with translated(self.where):
            async with self.client.start_session(snapshot=True) as session:
                yield session

    async def transaction(
        self, work: Callable[Concatenate[Session, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run the work in one transaction, again from its start when it lost against another one.

        The work may be called several times, so it must not change anything but the database.
        """
        async with self.session() as session:
            return await transact(session, lambda: work(session, *args, **kwargs), Patience())

    async def run(self, job: Awaitable[T]) -> T:
        """Await something of the driver's, with its errors in our words."""
        with translated(self.where):
            return await job

    async def close(self) -> None:
        """Close the client, if it is ours. A second call does nothing."""
        if self._ours:
            await self.client.close()


class Patience:
    """How long to go on trying, and how long to pause before the next time.

    ```python
    patience = Patience(seconds=5)
    await patience.pause(error)  # raises the error once the time is up
    ```
    """

    def __init__(self, seconds: float = TRANSACTION_SECONDS) -> None:
        self._give_up = time.monotonic() + seconds
        self._longest = 0.002

    async def pause(self, error: BaseException) -> None:
        """Sleep a little, at random and longer each time; or raise the error, because the time is up."""
        # Not a secret: the pause only has to differ from that of the transaction we lost against.
        pause = random.uniform(0, self._longest)
        self._longest = min(PAUSE_SECONDS_MAX, self._longest * 2)
        if time.monotonic() + pause > self._give_up:
            raise error
        await sleep(pause)


def objection(hello: Mapping[str, Any]) -> str | None:
    """Say why a server will not do, from how it introduces itself; None if it will.

    >>> objection({"setName": "rs0", "maxWireVersion": 9})
    'this server is older than MongoDB 5.0; upgrade it'
    """
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        return STANDALONE
    return TOO_OLD if hello["maxWireVersion"] < WIRE_VERSION_MIN else None


async def transact(session: Session, work: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Begin, work, commit; all of it again where the server says so, while there is patience."""
    while True:
        try:
            await begin(session)
            result = await work()
            await commit(session, patience)
            return result
        except PyMongoError as error:
            await abort(session)
            if not passing(error):
                raise
            await patience.pause(error)
        except BaseException:
            await abort(session)
            raise


async def begin(session: Session) -> None:
    """Start a transaction as all of ours are: one snapshot, committed to a majority, on the primary."""
    await session.start_transaction(ReadConcern("snapshot"), MAJORITY, ReadPreference.PRIMARY)


async def commit(session: Session, patience: Patience) -> None:
    """Commit; if nobody knows whether that went well, commit again, which the server takes as the same commit."""
    while True:
        try:
            await session.commit_transaction()
            return
        except PyMongoError as error:
            if not unknown_commit(error):
                raise
            await patience.pause(error)


async def abort(session: Session) -> None:
    """Give a transaction up. One that has ended already, or was lost with its connection, is as good as aborted."""
    if session.in_transaction:
        # The driver swallows what goes wrong here: the server ends the transaction by itself.
        await session.abort_transaction()


def collection(client: Any, schema: str, name: str) -> Any:
    """Return a collection of the outbox through any client, synchronous or not, whatever its own settings are."""
    return client[schema].get_collection(
        name,
        codec_options=CODEC,
        read_preference=ReadPreference.PRIMARY,
        write_concern=MAJORITY,
        read_concern=ReadConcern("majority"),
    )


def now_expression(clock: Clock | None) -> Expression:
    """Return the present as an expression.

    >>> now_expression(None)
    '$$NOW'
    """
    return "$$NOW" if clock is None else floor(clock.now())


def milliseconds(seconds: float) -> int:
    """Return a delay in the unit of the database, rounded up.

    >>> milliseconds(0.0001)
    1
    """
    # Less than a nanosecond is the noise of floating point, not a delay.
    return math.ceil(round(seconds * 1000, 6))


def floor(moment: datetime) -> datetime:
    """Return a time as the database would hold it: whole milliseconds, rounded down.

    >>> floor(datetime(2030, 1, 1, microsecond=1_999)).microsecond
    1000
    """
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def ceiling(moment: datetime | None) -> datetime | None:
    """Return a due time in whole milliseconds, rounded up, so that nothing is due early.

    >>> ceiling(datetime(2030, 1, 1, microsecond=1_001)).microsecond
    2000
    """
    if moment is None or (rest := moment.microsecond % 1000) == 0:
        return moment
    return moment + timedelta(microseconds=1000 - rest)
