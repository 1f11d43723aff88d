"""Connections to PostgreSQL, and the translation of driver errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg

from outrider.errors import OutriderError, Permanent, Transient, Unreachable, UsageError
from outrider.outbox.model import Lease
from outrider.redaction import without_values
from outrider.stores.migrations import check_version
from outrider.telemetry.events import ConnectionsScarce
from outrider.telemetry.log_observer import LogObserver

Connection = asyncpg.pool.PoolConnectionProxy | asyncpg.Connection

_TRANSIENT = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.TooManyConnectionsError,
    asyncpg.OperatorInterventionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InsufficientResourcesError,
)
_AWAY = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
_UNINSTALLED = (asyncpg.UndefinedTableError, asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError)


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Translate errors of the driver: transient, unreachable, or not installed."""
    try:
        yield
    except (OutriderError, asyncio.CancelledError):
        raise
    except _UNINSTALLED as error:
        raise UsageError(
            f"the outbox is not installed in {where} ({without_values(error)}); run: outrider db migrate"
        ) from error
    except asyncpg.ReadOnlySQLTransactionError as error:
        raise UsageError(f"{where} is a read replica; point the store at the primary") from error
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise UsageError(
            f"{where} rejected the connection: {without_values(error)}; check user, password and database"
        ) from error
    except asyncpg.ProtocolViolationError as error:
        remedy = "behind a pooler such as PgBouncer, add pooled=true to the store's URL"
        raise UsageError(f"{where} does not accept the protocol ({without_values(error)}); {remedy}") from error
    except _TRANSIENT as error:
        raise Transient(f"{where}: {without_values(error)}") from error
    except _AWAY as error:
        raise Unreachable(f"{where} does not answer ({_translate(error)}); is it running?") from error
    except asyncpg.InsufficientPrivilegeError as error:
        said = without_values(error)
        raise UsageError(f"{where}: {said}; grant the role USAGE on the schema and rights on its tables") from error
    except asyncpg.PostgresError as error:
        raise Permanent(f"{where}: {type(error).__name__}: {without_values(error)}") from error


def _translate(error: BaseException) -> str:
    return f"{type(error).__name__}: {without_values(error)}" if str(error) else type(error).__name__


STATEMENT_SECONDS = 60.0
"""The time limit of a statement of the store, including the wait for locks."""

STALL_SECONDS = 5.0
"""The time after which the server ends a transaction whose client is silent, or does not read its result."""

BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED; "
    f"SET LOCAL idle_in_transaction_session_timeout = {STALL_SECONDS * 1000:.0f}; "
    f"SET LOCAL tcp_user_timeout = {STALL_SECONDS * 1000:.0f}; "
    f"SET LOCAL statement_timeout = {STATEMENT_SECONDS * 1000:.0f}; "
    "SET LOCAL plan_cache_mode = force_custom_plan"
)
"""Starts a transaction with limits on the server's side: a client that is frozen cannot end its own transaction, and
would keep its locks. Local settings also work behind a pooler, which does not let a client set them for a session.

Its statements are planned anew, for the present size of the tables. A plan that the server has kept from a time when
the outbox was empty would read the whole outbox for each batch."""


CONNECTIONS_MAX = 32
"""The largest pool by default. A server allows 100 connections by default, to all processes together."""

RESERVED = 2
"""Connections that are never given to handlers, so that claims, renewals and turns continue."""


def pool_size(
    connections_max: int | None, concurrency: int | None, *, where: str, default: int = CONNECTIONS_MAX
) -> int:
    """Return the size of a pool: as given, or for the concurrency. A given size that is too small is logged.

    >>> pool_size(None, 8, where="PostgreSQL"), pool_size(None, 64, where="PostgreSQL")
    (10, 32)
    """
    if concurrency is None:
        return default if connections_max is None else connections_max
    wanted = concurrency + RESERVED
    if connections_max is None:
        return min(wanted, CONNECTIONS_MAX)
    if connections_max < wanted:
        at_once = max(1, connections_max - RESERVED)
        remedy = f"{at_once} run at a time; write connections_max={wanted} in the URL, or lower the concurrency"
        LogObserver().emit(ConnectionsScarce(where, connections_max, concurrency, remedy))
    return connections_max


class PostgresDatabase:
    """A connection pool that reads JSON as the bytes of the server.

    With `plain`, connections have the defaults of the driver, because handlers of the application use them.
    """

    def __init__(self, url: str, *, connections_max: int = 8, pooled: bool = False, plain: bool = False) -> None:
        self.url = url
        self.where = location(url)
        self._connections_max = connections_max
        self.pooled, self._plain = pooled, plain
        self._pool: asyncpg.Pool | None = None
        self._ours = True

    @classmethod
    def over(cls, pool: asyncpg.Pool) -> PostgresDatabase:
        """Work through a pool that the application owns and closes. The pool may or may not lead to a pooler."""
        database = cls("", pooled=True, plain=True)
        database.where, database._pool, database._ours = "PostgreSQL", pool, False
        return database

    @property
    def pool(self) -> asyncpg.Pool:
        """The pool of asyncpg."""
        assert self._pool is not None, "open() comes first"
        return self._pool

    async def open(self) -> None:
        """Connect. Prepared statements are off behind a pooler that shares sessions between clients."""
        with translated(self.where):
            self._pool = await asyncpg.create_pool(
                self.url,
                # No minimum: the pool would otherwise fill the log with connection attempts while the server is away.
                min_size=0,
                max_size=self._connections_max,
                init=None if self._plain else _read_json_as_bytes,
                # Handlers may leave state in a session. Sessions behind a pooler are reset by the pooler.
                reset=None if self._plain and not self.pooled else _leave_as_it_is,
                statement_cache_size=0 if self.pooled else 256,
                timeout=10,
                command_timeout=None if self._plain else STATEMENT_SECONDS,
                server_settings=_session(self.pooled, self._plain),
            )

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """Open a connection from the pool."""
        with translated(self.where):
            async with self.pool.acquire() as conn:
                try:
                    yield conn
                except _AWAY:
                    # The session is in an unknown state and must leave the pool. If the pool has already removed the
                    # connection, there is nothing to close.
                    with suppress(asyncpg.InterfaceError):
                        conn.terminate()
                    raise

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """Open a connection with a transaction, in which no client can stall for long."""
        async with self.connection() as conn:
            await conn.execute(BEGIN)
            try:
                yield conn
            except BaseException:
                # After a lost connection there is nothing to roll back.
                if not conn.is_closed():
                    await conn.execute("ROLLBACK")
                raise
            await conn.execute("COMMIT")

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[Any]:
        """Open a connection for one statement. A pooler needs a transaction, to stay on one server."""
        async with self.transaction() if self.pooled else self.connection() as conn:
            yield conn

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run one statement and return its rows."""
        async with self.statement() as conn:
            rows: list[Any] = await conn.fetch(sql, *args, timeout=STATEMENT_SECONDS)
            return rows

    async def execute(self, sql: str, *args: Any) -> int:
        """Run one statement and return the number of affected rows."""
        async with self.statement() as conn:
            return touched(await conn.execute(sql, *args, timeout=STATEMENT_SECONDS))

    async def installation(self, schema: str) -> dict[str, str]:
        """Return the facts of an installation. A replica is rejected, and so are tables of a newer version."""
        rows = await self.fetch(f"SELECT name, value, pg_is_in_recovery() FROM {schema}.outbox_meta")  # noqa: S608
        if any(replica for _, _, replica in rows):
            raise UsageError(f"{self.where} is a read replica; point the store at the primary")
        facts = {name: value for name, value, _ in rows}
        check_version(f"{self.where}, schema {schema}", facts)
        return facts

    async def close(self) -> None:
        """Close the pool, with a wait of at most a few seconds."""
        if self._pool is None or not self._ours:
            return
        try:
            await asyncio.wait_for(self._pool.close(), timeout=5)
        except TimeoutError:
            self._pool.terminate()


def location(url: str) -> str:
    """Return server and database of a URL, without secrets. An ambiguous URL is rejected.

    >>> location("postgresql://app:secret@db/shop?sslmode=require")
    'PostgreSQL at db:5432, database shop'
    """
    remedy = "characters such as @ / # ? : in a user or password must be percent-encoded (# is %23, / is %2F, @ is %40)"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UsageError(f"the PostgreSQL URL cannot be read: its host or port makes no sense; {remedy}") from None
    if "@" in parts.path or "@" in parts.query or "@" in parts.fragment or parts.fragment:
        raise UsageError(f"the PostgreSQL URL cannot be read: it has an @ or # where none belongs; {remedy}")
    database = f", database {unquote(parts.path[1:])}" if parts.path[1:] else ""
    return (f"PostgreSQL at {host}:{port or 5432}" if host else "PostgreSQL at its default address") + database


def fence(lease: Lease) -> tuple[str, list[int], list[int]]:
    """Return a lease as the first three parameters of every fenced statement."""
    return lease.owner, list(lease.epochs), list(lease.epochs.values())


def touched(tag: str) -> int:
    """Return the row count of a command tag.

    >>> touched("INSERT 0 12")
    12
    """
    return int(tag.rsplit(" ", 1)[-1])


def _session(pooled: bool, plain: bool) -> dict[str, str]:
    if pooled:
        return {"application_name": "outrider"}
    # Every statement must see all earlier commits, whatever the default of the database is.
    settings = {"application_name": "outrider", "default_transaction_isolation": "read committed"}
    if not plain:
        settings["statement_timeout"] = f"{STATEMENT_SECONDS * 1000:.0f}"
        # A statement outside of a transaction may keep its plan, because planning takes longer than a small batch. A
        # plan from a time when the outbox was empty must use the indexes as well.
        settings |= {"enable_seqscan": "off", "jit": "off"}
    else:
        # A handler transaction may be long. If its machine is gone, its locks must not stay for hours.
        settings |= {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3"}
    return settings


async def _leave_as_it_is(conn: Any) -> None:
    """Do nothing: statements of the store leave no state in a session, so a reset would waste a round trip."""


async def _read_json_as_bytes(conn: Any) -> None:
    # The payload stays the text of the database; decoding and encoding it again would only cost time.
    await conn.set_type_codec("json", schema="pg_catalog", encoder=bytes, decoder=bytes, format="binary")
