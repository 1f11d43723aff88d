"""What the contract suites need around a store that lends: functions that suit the kind, and time.

The suites' functions are asynchronous. For a kind whose functions are plain, each is run to its end on the thread it is
called on, with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg

from outrider import app
from outrider.drivers import asyncpg as asyncpg_driver
from outrider.drivers import base
from outrider.handler_transactions import HandlerTransaction, WrappedTransaction
from outrider.outbox.store import OutboxStore
from outrider.saga.model import Status
from outrider.saga.store import SagaStore
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, SagaBench
from outrider.testing.contracts.saga_messages import ParticipantRules
from outrider.testing.contracts.saga_turns import HandlerTransactionRules, OutboxRules, TurnRules
from tests.contract.lenders.kinds import Kind


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a plain function of one that is asynchronous."""
    if not inspect.iscoroutinefunction(function):
        return function

    def run(argument: Any, tx: Any) -> Any:
        return asyncio.run(function(argument, tx))

    return run


class FittedTransaction(WrappedTransaction):
    """A transaction whose functions are made to suit the kind."""

    def __init__(self, inner: HandlerTransaction, fit: Callable[..., Any]) -> None:
        super().__init__(inner)
        self._fit = fit

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        return await super().call(self._fit(function), argument)


class FittedSource:
    """A source of such transactions."""

    def __init__(self, source: Any, fit: Callable[..., Any]) -> None:
        self._source, self._fit = source, fit

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        async with self._source.open() as tx:
            yield FittedTransaction(tx, self._fit)

    def check_handler(self, function: Callable[..., Any]) -> Any:
        return self._source.check_handler(self._fit(function))


class Fitted:
    """A store whose functions are made to suit the kind."""

    def __init__(self, store: Any, *, plain: bool) -> None:
        self._store, self._fit = store, plainly if plain else lambda function: function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def transactions(self) -> Any:
        return FittedSource(self._store.transactions, self._fit)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._fitted(self._store.transaction())

    @asynccontextmanager
    async def _fitted(self, opened: AbstractAsyncContextManager[HandlerTransaction]) -> AsyncIterator[Any]:
        async with opened as tx:
            yield FittedTransaction(tx, self._fit)


class Lent(Fitted):
    """Sagas all of whose transactions are lent ones, so that everything is written through them."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.transactions.open()  # type: ignore[no-any-return]


class Effects:
    """Effects in a table of the application, written through the kind under test."""

    _kind: Kind

    async def effect(self, tx: Any, text: str) -> None:
        """Write an effect as an application does."""
        await _awaited(self._kind.write(tx, text))

    async def effects(self) -> list[str]:
        """Return the effects that were committed."""
        return [row[0] for row in await self._kind.database.fetch("SELECT what FROM effects ORDER BY id")]


class LentRules:
    """What is another rule where a function gets the application's own kind: it does what an application does."""

    async def test_a_steps_function_works_in_the_turns_transaction(self, bench: Any) -> None:
        record = await bench.start_and_claim()

        async def act(what: str, given: Any) -> str:
            await bench.effect(given, what)
            return "what it returns"

        async with bench.store.transaction() as tx:
            assert await tx.call(act, "paid") == "what it returns"
            await bench.save_in(tx, record, status=Status.RUNNING)
        assert (await bench.show(record.instance.saga_id)).instance.status is Status.RUNNING
        assert await bench.effects() == ["paid"]


class LentTurnRules(TurnRules, HandlerTransactionRules, OutboxRules, ParticipantRules):
    """All that is done to sagas in a transaction that is lent; claims, mail and upkeep have the store's own."""


class LentInboxBench(Effects, InboxBench):
    """An inbox that lends the kind under test."""

    def __init__(self, store: Any, clock: ManualClock, kind: Kind, pool: Any) -> None:
        super().__init__(store, clock)
        self._kind, self._pool = kind, pool

    async def end(self, tx: Any, *, commit: bool) -> None:
        await _awaited(self._kind.end(tx, commit=commit))

    async def staged(self) -> int:
        [[count]] = await self._kind.database.fetch(f"SELECT count(*) FROM {self._kind.database.prefix}outbox")
        return int(count)

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        if self._pool is not None:
            await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())


class LentSagaBench(Effects, SagaBench):
    """Sagas in PostgreSQL, written through lent transactions; from outside, through asyncpg."""

    def __init__(self, store: Any, other: Any, clock: ManualClock, kind: Kind, pool: Any) -> None:
        super().__init__(store, clock)
        self._other, self._kind, self._pool = other, kind, pool

    def other(self) -> SagaStore:
        return self._other  # type: ignore[no-any-return]

    def outside(self) -> AbstractAsyncContextManager[Any]:
        return self._pool.acquire()  # type: ignore[no-any-return]

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[OutboxStore]:
        store = await app.open_store(self._kind.database.url)
        yield store
        await store.close()

    async def call_driver(self, verb: str, tx: Any, *args: Any) -> Any:
        driver = base if isinstance(tx, HandlerTransaction) else asyncpg_driver
        return await driver.run(tx, verb, args, "outrider")

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())


@asynccontextmanager
async def lent_inbox(kind: Kind) -> AsyncIterator[LentInboxBench]:
    """Open an inbox in PostgreSQL that lends a kind of transactions."""
    async with asyncpg.create_pool(kind.database.url, min_size=1, max_size=2) as pool:
        store = await app.open_inbox(kind.database.url, transactions=kind.source)
        try:
            yield LentInboxBench(Fitted(store, plain=kind.plain), ManualClock(), kind, pool)
        finally:
            await store.close()


@asynccontextmanager
async def lent_sagas(kind: Kind) -> AsyncIterator[LentSagaBench]:
    """Open sagas in PostgreSQL that lend a kind of transactions; the other store lends its own."""
    url = kind.database.url
    async with asyncpg.create_pool(url, min_size=1, max_size=4) as pool:
        store, other = await app.open_sagas(url, transactions=kind.source), await app.open_sagas(url)
        try:
            yield LentSagaBench(Lent(store, plain=kind.plain), other, ManualClock(), kind, pool)
        finally:
            await store.close()
            await other.close()


async def _awaited(done: Any) -> None:
    if inspect.isawaitable(done):
        await done
