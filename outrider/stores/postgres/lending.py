"""A store that lends its transactions to other people's code: what inbox and sagas have in common.

Its connections are as the driver makes them, and it can work through the application's own pool.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, ClassVar, Self

import asyncpg

from outrider.errors import Misuse, OutriderError, Transient
from outrider.stores.loans import Lender, Loan
from outrider.stores.postgres import calling
from outrider.stores.postgres.database import STATEMENT_SECONDS, Database
from outrider.stores.postgres.transaction import handling
from outrider.stores.queries import identifier

BATCH_MAX = 1000
KEPT_BACK = 2
"""Connections that no function of somebody else ever has, so that claims, renewals and turns go on."""
ELSEWHERE = (
    "`transactions` leads to another database than the store, {0}; what a handler writes and the receipt for it could "
    "not be committed together: let both lead to the same one"
)


class Lending:
    """Transactions of a pool, or of the application's own kind, and the store's own statements in them."""

    WHAT: ClassVar[str]
    """What it is called when it is not installed."""
    LAST_STEP: ClassVar[str]
    """What the last step of its migration made."""
    LOCKED: ClassVar[str]
    """What another transaction may hold when a statement does not end."""

    sql: dict[str, str]

    def __init__(self, database: Database, *, schema: str = "outrider") -> None:
        self._database, self._schema = database, identifier(schema)
        self._lendable: asyncio.Semaphore | None = None
        self._lender: Lender | None = None
        self._lent: dict[int, int] = {}
        """The numbers of transactions that are lent now: another one has another."""

    @classmethod
    async def open(cls, url: str, *, schema: str = "outrider", connections_max: int = 10, pooled: bool = False) -> Self:
        """Connect to an installed store; refuse one that is not, and refuse a replica::

        inbox_store = await PostgresInbox.open("postgresql://localhost/shop")
        """
        identifier(schema)
        database = Database(url, connections_max=connections_max, pooled=pooled, plain=True)
        await database.open()
        try:
            await cls._check(database, schema)
        except BaseException:
            await database.close()
            raise
        return cls(database, schema=schema)

    @classmethod
    def over(cls, pool: asyncpg.Pool, *, schema: str = "outrider") -> Self:
        """Work through a pool of yours, which stays yours to close::

        inbox_store = PostgresInbox.over(await asyncpg.create_pool("postgresql://localhost/shop"))
        """
        return cls(Database.over(pool), schema=schema)

    async def lend_from(self, lender: Lender) -> None:
        """Lend transactions of the application's own kind from now on; refuse those of another database::

        await inbox_store.lend_from(lender_of(session_factory))
        """
        if lender.vendor != "postgresql":
            raise Misuse(ELSEWHERE.format(self._database.where))
        # A lock that one has is a lock that the other cannot have, if and only if their database is the same.
        number = secrets.randbits(62)
        async with lender.transaction() as loan:
            await loan.execute("SELECT pg_advisory_xact_lock($1::bigint)::text", number)
            [[elsewhere]] = await self._database.fetch("SELECT pg_try_advisory_xact_lock($1::bigint)", number)
        if elsewhere:
            raise Misuse(ELSEWHERE.format(self._database.where))
        self._lender = lender

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return handling(self._database) if self._lender is None else self._lender.transaction()

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        """Open a transaction for a function that may take its time; our own work never waits behind those."""
        if self._lender is not None:
            async with self._lender.transaction() as loan:
                yield loan
            return
        if self._lendable is None:
            self._lendable = asyncio.Semaphore(max(1, self._database.pool.get_max_size() - KEPT_BACK))
        async with self._lendable, handling(self._database) as tx:
            yield tx

    def objection(self, function: Callable[..., Any]) -> str | None:
        return calling.objection(function) if self._lender is None else self._lender.objection(function)

    async def call(self, function: Callable[..., Any], argument: Any, tx: Any) -> Any:
        if isinstance(tx, Loan):
            return await tx.call(function, argument)
        return await calling.call(function, argument, tx)

    def sever(self, tx: Any) -> None:
        # Without its connection, a function that goes on can do nothing: not even between our rollback and the pool.
        tx.sever() if isinstance(tx, Loan) else tx.terminate()

    def telling(self, tx: Any) -> AbstractContextManager[None]:
        return nullcontext() if isinstance(tx, Loan) else calling.told(self._database.where, tx)

    async def run(self, tx: Any, verb: str, *args: Any) -> list[Any]:
        """Run one of our statements in a transaction that was lent."""
        if isinstance(tx, Loan):
            return await self._in_time(verb, tx.execute(self.sql[verb], *args))
        with calling.told(self._database.where, tx):
            return await self._in_time(verb, tx.fetch(self.sql[verb], *args, timeout=STATEMENT_SECONDS))

    async def _has_committed(self, number: int | None) -> bool:
        """Tell whether a transaction that was lent is committed, so that a function which failed has done it itself."""
        if number is None:
            return False
        try:
            [[status]] = await self._database.fetch("SELECT txid_status($1)", number)
        except OutriderError:
            return False
        return bool(status == "committed")

    async def close(self) -> None:
        if self._lender is not None:
            await self._lender.close()
        await self._database.close()

    async def _in_time(self, verb: str, statement: Awaitable[list[Any]]) -> list[Any]:
        try:
            return await statement
        except TimeoutError as error:
            raise Transient(
                f"{self._database.where}: {verb} did not end within {STATEMENT_SECONDS:.0f} s; another transaction may "
                f"hold the same {self.LOCKED}"
            ) from error

    async def _in_batches(self, verb: str, *args: Any) -> int:
        total, count = 0, BATCH_MAX
        while count == BATCH_MAX:
            count = await self._database.execute(self.sql[verb], *args, BATCH_MAX)
            total += count
        return total

    @classmethod
    async def _check(cls, database: Database, schema: str) -> None:
        """Refuse a schema in which the last step of the migration was not taken."""
        sql = "SELECT to_regclass($1) IS NOT NULL, pg_is_in_recovery()"
        [[installed, replica]] = await database.fetch(sql, f"{schema}.{cls.LAST_STEP}")
        if not installed:
            where = f"{database.where}, schema {schema}"
            raise Misuse(f"the {cls.WHAT} is not installed in {where}; run: outrider db migrate")
        if replica:
            raise Misuse(f"{database.where} is a read replica; point the store at the primary")
