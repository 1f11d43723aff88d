"""The client, sessions and transactions of MongoDB.

A transaction of the store is a function over a session. The function reads one snapshot and commits to a majority. The
server may ask for a retry from the start, so the function must have no effect outside the database. All retries are
bounded by time.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, ReadPreference
from pymongo import errors as mongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.uri_parser import parse_uri
from pymongo.write_concern import WriteConcern

from outrider.clock import Clock
from outrider.errors import OutriderError, Permanent, Transient, Unreachable, UsageError, WriteConflict
from outrider.redaction import without_values
from outrider.stores.queries import identifier

P = ParamSpec("P")

T = TypeVar("T")

Document = dict[str, Any]

Session = AsyncClientSession

Documents = AsyncCollection[Document]

Expression = datetime | str

TRANSACTION_SECONDS = 20.0
"""The time in which the store retries a transaction before the error is raised as Transient."""

PAUSE_SECONDS_MAX = 0.25

WIRE_VERSION_MIN = 13
"""The wire version of MongoDB 5.0."""

# Text of foreign writers may be invalid UTF-8 and must not stop a lane; replacement characters are delivered.
CODEC: CodecOptions[Document] = CodecOptions(
    tz_aware=True, uuid_representation=UuidRepresentation.STANDARD, unicode_decode_error_handler="replace"
)

MAJORITY = WriteConcern("majority", j=True)

STANDALONE = (
    "this server is in no replica set, and transactions need one; start mongod with --replSet and run rs.initiate(), "
    "a set of one member will do"
)

TOO_OLD = "this server is older than MongoDB 5.0; upgrade it"

NOT_INSTALLED = "run: outrider db migrate"

# Error codes of the server; their names are in its error_codes.yml.
UNAUTHORIZED = 13
"""The code of an operation that the role of the user does not allow."""

_UNAUTHORIZED = {UNAUTHORIZED, 18, 8000}

_NO_REPLICA_SET = {20, 263}

_MISSING = {26, 27}

_AWAY = {6, 7, 89, 91, 189, 9001, 10107, 11600, 11602, 13435, 13436}

_TRANSIENT = {24, 46, 50, 64, 112, 125, 134, 175, 225, 239, 244, 246, 251, 262, 290, 391}

SCHEMES = ("mongodb://", "mongodb+srv://")

_REMEDY = (
    "write mongodb://user:password@host:27017/?replicaSet=name; characters such as @ / # ? : in a user or password "
    "must be percent-encoded (# is %23, / is %2F, @ is %40)"
)

_HOSTS = re.compile(r"[A-Za-z0-9._\-:,\[\]%]+")

# Shorter timeouts than the defaults of the driver: a service must notice soon that its server is gone.
_CONNECT_SECONDS = {"serverSelectionTimeoutMS": 10_000, "connectTimeoutMS": 10_000, "socketTimeoutMS": 60_000}


class MongoDatabase:
    """The collections of one outbox, reached through one client.

    Tests pass `clock`; otherwise the server's time counts.

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
    async def open(cls, url: str, schema: str = "outrider", *, clock: Clock | None = None) -> MongoDatabase:
        """Connect with a client that the database owns. A server that cannot give the needed guarantees is rejected."""
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
    ) -> MongoDatabase:
        """Work through a client that the application owns and closes. Call `check` to verify the server."""
        return cls(client, schema, "MongoDB", clock=clock)

    async def check(self) -> None:
        """Reject a server without transactions or without snapshot reads outside of transactions."""
        with translated(self.where):
            hello = await self.client.admin.command("hello")
        if remedy := check_handler(hello):
            raise UsageError(f"{self.where}: {remedy}")

    def __getitem__(self, name: str) -> Documents:
        """Return a collection of the outbox. Outside of transactions, reads and writes use a majority."""
        made: Documents = collection(self.client, self.schema, name)
        return made

    @property
    def now(self) -> Expression:
        """The current time as an expression for `$expr` and pipelines: the time of the server or of a test clock."""
        return now_expression(self.clock)

    def after(self, seconds: float) -> Expression | Document:
        """Return the expression for a time in the future, rounded up and therefore never early."""
        return {"$add": [self.now, milliseconds(seconds)]}

    def present(self, server_time: datetime) -> datetime:
        """Return the current time: the time of the test clock if present, otherwise the given time of the server."""
        return server_time if self.clock is None else floor(self.clock.now())

    async def time(self, session: Session | None = None) -> datetime:
        """Query the current time of the database."""
        # A session belongs to its client, which may be a client of the application.
        client = session.client if session else self.client
        meta: Documents = collection(client, self.schema, "outbox_meta")
        rows = await meta.find({}, {"now": "$$NOW"}, session=session).limit(1).to_list()
        if not rows:
            raise UsageError(f"the outbox is not installed in {self.where}; {NOT_INSTALLED}")
        return self.present(rows[0]["now"])

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Open a session for a caller that runs transactions by hand."""
        with translated(self.where):
            async with self.client.start_session() as session:
                yield session

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Session]:
        """Open a session in which all reads see one snapshot, without a transaction."""
        with translated(self.where):
            async with self.client.start_session(snapshot=True) as session:
                yield session

    async def transaction(
        self, work: Callable[Concatenate[Session, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run the work in one transaction and retry from the start after a write conflict.

        The work may be called several times, so it must change only the database.
        """
        async with self.session() as session:
            return await transact(session, lambda: work(session, *args, **kwargs), RetryBudget())

    async def run(self, job: Awaitable[T]) -> T:
        """Await a call of the driver and translate driver errors."""
        with translated(self.where):
            return await job

    async def close(self) -> None:
        """Close the client if the database owns the client. A second call does nothing."""
        if self._ours:
            await self.client.close()


class RetryBudget:
    """The time left for retries, and the pause before the next retry.

    ```python
    patience = Patience(seconds=5)
    await patience.pause(error)  # raises the error once the time is up
    ```
    """

    def __init__(self, seconds: float = TRANSACTION_SECONDS) -> None:
        self._give_up = time.monotonic() + seconds
        self._longest = 0.002

    async def pause(self, error: BaseException) -> None:
        """Sleep for a random pause that grows with each call, or raise the error when the time is up."""
        # No cryptographic randomness is needed: the pause only has to differ from the pause of the competing
        # transaction.
        pause = random.uniform(0, self._longest)
        self._longest = min(PAUSE_SECONDS_MAX, self._longest * 2)
        if time.monotonic() + pause > self._give_up:
            raise error
        await sleep(pause)


def check_handler(hello: Mapping[str, Any]) -> str | None:
    """Return the reason why a server is unsuitable, read from its `hello` reply; None for a suitable server.

    >>> check_handler({"setName": "rs0", "maxWireVersion": 9})
    'this server is older than MongoDB 5.0; upgrade it'
    """
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        return STANDALONE
    return TOO_OLD if hello["maxWireVersion"] < WIRE_VERSION_MIN else None


async def transact(session: Session, work: Callable[[], Awaitable[T]], connect_seconds: RetryBudget) -> T:
    """Begin, run the work and commit. The server decides about retries; the retry budget limits them."""
    while True:
        try:
            await begin(session)
            result = await work()
            await commit(session, connect_seconds)
            return result
        except PyMongoError as error:
            await abort(session)
            if not is_transient(error):
                raise
            await connect_seconds.pause(error)
        except BaseException:
            await abort(session)
            raise


async def begin(session: Session) -> None:
    """Start a transaction with a snapshot read, a majority commit and the primary."""
    await session.start_transaction(ReadConcern("snapshot"), MAJORITY, ReadPreference.PRIMARY)


async def commit(session: Session, connect_seconds: RetryBudget) -> None:
    """Commit. After an unknown result the commit is repeated; the server treats the repetition as the same commit."""
    while True:
        try:
            await session.commit_transaction()
            return
        except PyMongoError as error:
            if not unknown_commit(error):
                raise
            await connect_seconds.pause(error)


async def abort(session: Session) -> None:
    """Abort a transaction. A transaction that has ended, or was lost with its connection, counts as aborted."""
    if session.in_transaction:
        # The driver ignores errors here, because the server ends the transaction by itself.
        await session.abort_transaction()


def collection(client: Any, schema: str, name: str) -> Any:
    """Return a collection of the outbox through any client, synchronous or asynchronous, with fixed options."""
    return client[schema].get_collection(
        name,
        codec_options=CODEC,
        read_preference=ReadPreference.PRIMARY,
        write_concern=MAJORITY,
        read_concern=ReadConcern("majority"),
    )


def now_expression(clock: Clock | None) -> Expression:
    """Return the current time as an expression.

    >>> now_expression(None)
    '$$NOW'
    """
    return "$$NOW" if clock is None else floor(clock.now())


def milliseconds(seconds: float) -> int:
    """Return a delay in milliseconds, rounded up.

    >>> milliseconds(0.0001)
    1
    """
    # Less than a nanosecond is floating-point noise and no delay.
    return math.ceil(round(seconds * 1000, 6))


def floor(moment: datetime) -> datetime:
    """Return a time as the database stores it: whole milliseconds, rounded down.

    >>> floor(datetime(2030, 1, 1, microsecond=1_999)).microsecond
    1000
    """
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def ceiling(moment: datetime | None) -> datetime | None:
    """Return a due time in whole milliseconds, rounded up, because no event may be due early.

    >>> ceiling(datetime(2030, 1, 1, microsecond=1_001)).microsecond
    2000
    """
    if moment is None or (rest := moment.microsecond % 1000) == 0:
        return moment
    return moment + timedelta(microseconds=1000 - rest)


def is_transient(error: BaseException) -> bool:
    """Return whether the server reports that a retry of the whole transaction may succeed."""
    return isinstance(error, mongo.PyMongoError) and error.has_error_label("TransientTransactionError")


def outrun(error: BaseException) -> bool:
    """Return whether the error is a write conflict, reported by a server that answers."""
    return isinstance(error, mongo.OperationFailure) and is_transient(error) and error.code not in _AWAY


def is_unauthorized(error: BaseException) -> bool:
    """Return whether the role of the user does not allow an operation, as the cause of a translated error."""
    return isinstance(error.__cause__, mongo.OperationFailure) and error.__cause__.code == UNAUTHORIZED


def unknown_commit(error: BaseException) -> bool:
    """Return whether the result of a commit is unknown."""
    return isinstance(error, mongo.PyMongoError) and error.has_error_label("UnknownTransactionCommitResult")


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Translate errors of the driver.

    ```python
    with translated("MongoDB at db:27017"):
        await collection.find_one()
    ```
    """
    try:
        yield
    except (OutriderError, asyncio.CancelledError):
        raise
    except mongo.PyMongoError as error:
        raise translation(error, where) from error


def translation(error: mongo.PyMongoError, where: str) -> OutriderError:
    """Return the Outrider error for an error of the driver.

    >>> translation(mongo.AutoReconnect("gone"), "MongoDB at db:27017")
    Unreachable('MongoDB at db:27017 does not answer (AutoReconnect: gone); is it running, and has it a primary?')
    """
    code = error.code if isinstance(error, mongo.OperationFailure) else None
    if isinstance(error, mongo.ConnectionFailure) or code in _AWAY:
        # The driver reports this text for servers that answer but belong to another replica set, or to none.
        named = "No replica set members" in str(error)
        uncertain = "is replicaSet in the URL the name of its replica set" if named else "has it a primary"
        return Unreachable(f"{where} does not answer ({_translate(error)}); is it running, and {uncertain}?")
    if outrun(error):
        return WriteConflict(f"{where}: another transaction was first ({_translate(error)}); try again")
    if code in _TRANSIENT or is_transient(error) or unknown_commit(error) or error.timeout:
        return Transient(f"{where}: {_translate(error)}; try again")
    if remedy := _remedy(error, code):
        return UsageError(f"{where}: {remedy} ({_translate(error)})")
    return Permanent(f"{where}: {_translate(error)}")


def _remedy(error: mongo.PyMongoError, code: int | None) -> str | None:
    """Return the change that an operator must make, or None if no change is needed."""
    if code in _UNAUTHORIZED:
        return "it rejected the login; check user, password and authSource, and the roles of the user"
    if code in _NO_REPLICA_SET and "replica set" in str(error):
        return STANDALONE
    if code in _MISSING:
        return f"the outbox is not installed; {NOT_INSTALLED}"
    if isinstance(error, mongo.ConfigurationError):
        return "it cannot be reached like this; check the options of the URL"
    return None


def _translate(error: BaseException) -> str:
    # The driver appends the topology or the whole reply; the first line has the reason.
    text = str(error).split(", Timeout: ", 1)[0].split(", full error: ", 1)[0]
    if isinstance(error, mongo.BulkWriteError) and (found := error.details.get("writeErrors")):
        text = found[0]["errmsg"]
    return f"{type(error).__name__}: {without_values(text)}" if text else type(error).__name__


def check_url(url: str) -> str:
    """Return the name of the server in a URL. An ambiguous URL is rejected.

    >>> check_url("mongodb://user:secret@db1,db2:27018/?replicaSet=rs0")
    'MongoDB at db1,db2:27018'
    """
    scheme = next((scheme for scheme in SCHEMES if url.startswith(scheme)), None)
    if scheme is None:
        raise UsageError(f"this is no URL of MongoDB; {_REMEDY}")
    authority, *_ = re.split(r"[/?#]", url.removeprefix(scheme), maxsplit=1)
    hosts = authority.rpartition("@")[2]
    rest = url.removeprefix(scheme + authority)
    if "@" in rest or "#" in rest or not _HOSTS.fullmatch(hosts):
        raise UsageError(f"the MongoDB URL cannot be read: an @, # or / where none belongs, or no host; {_REMEDY}")
    if scheme == SCHEMES[0]:
        _check_parts(url)
    return f"MongoDB at {hosts}"


def _check_parts(url: str) -> None:
    try:
        parse_uri(url)
    except (PyMongoError, ValueError):
        # The text of the driver may contain a part of the password.
        raise UsageError(f"the MongoDB URL cannot be read: a host, port or option makes no sense; {_REMEDY}") from None


def client_options(url: str) -> dict[str, Any]:
    """Return the options of a client that the database owns. Timeouts in the URL take precedence.

    >>> client_options("mongodb://db/?socketTimeoutMS=5000").get("socketTimeoutMS") is None
    True
    """
    text = url.partition("?")[2].lower()
    connect_seconds = {name: value for name, value in _CONNECT_SECONDS.items() if f"{name.lower()}=" not in text}
    # A polling monitor needs one connection less per server, and polls at once after an error. A streaming monitor
    # would wait for up to ten seconds.
    return {
        **connect_seconds,
        "serverMonitoringMode": "poll",
        "appname": "outrider",
        "tz_aware": True,
        "uuidRepresentation": "standard",
    }
