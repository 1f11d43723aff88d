"""Benches of the contract suites for one kind of handler transaction: adapted functions, and the clock.

The suites' functions are asynchronous. For a kind whose functions are plain, each is run to its end on the thread it is
called on, with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
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
from tests.contract.handler_transactions.transaction_kinds import Kind


def as_plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a plain function of one that is asynchronous."""
    if not inspect.iscoroutinefunction(function):
        return function

    def run(argument: Any, tx: Any) -> Any:
        return asyncio.run(function(argument, tx))

    return run


class AdaptedTransaction(WrappedTransaction):
    """A transaction that adapts functions to the kind."""

    def __init__(self, inner: HandlerTransaction, adapt: Callable[..., Any]) -> None:
        super().__init__(inner)
        self._adapt = adapt

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        return await super().call(self._adapt(function), argument)


class AdaptedSource:
    """A source of such transactions."""

    def __init__(self, source: Any, adapt: Callable[..., Any]) -> None:
        self._source, self._adapt = source, adapt

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        async with self._source.open() as tx:
            yield AdaptedTransaction(tx, self._adapt)

    def check_handler(self, function: Callable[..., Any]) -> Any:
        return self._source.check_handler(self._adapt(function))


class AdaptedStore:
    """A store that adapts functions to the kind."""

    def __init__(self, store: Any, *, plain: bool) -> None:
        self._store, self._adapt = store, as_plain_function if plain else lambda function: function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def transactions(self) -> Any:
        return AdaptedSource(self._store.transactions, self._adapt)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._adapted(self._store.transaction())

    @asynccontextmanager
    async def _adapted(self, opened: AbstractAsyncContextManager[HandlerTransaction]) -> AsyncIterator[Any]:
        async with opened as tx:
            yield AdaptedTransaction(tx, self._adapt)


class AdaptedSagas(AdaptedStore):
    """Sagas that write everything through handler transactions."""

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


class HandlerTransactionKindRules:
    """The rules that differ for a function that gets the application's own kind of transaction."""

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


class KindTurnRules(TurnRules, HandlerTransactionRules, OutboxRules, ParticipantRules):
    """The saga rules that use a handler transaction; claims, messages and maintenance use the store's own."""


class KindInboxBench(Effects, InboxBench):
    """An inbox whose handler transactions are of the kind under test."""

    def __init__(self, store: Any, clock: ManualClock, kind: Kind, pool: Any) -> None:
        super().__init__(store, clock)
        self._kind, self._pool = kind, pool

    async def end(self, tx: Any, *, commit: bool) -> None:
        await _awaited(self._kind.end(tx, commit=commit))

    async def staged(self) -> list[dict[str, str]]:
        prefix = self._kind.database.prefix
        rows = await self._kind.database.fetch(f"SELECT CAST(headers AS text) FROM {prefix}outbox ORDER BY id")
        return [json.loads(row[0]) for row in rows]

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        if self._pool is not None:
            await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())


class KindSagaBench(Effects, SagaBench):
    """Sagas in PostgreSQL, written through handler transactions; from outside, through asyncpg."""

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
async def open_inbox_bench(kind: Kind) -> AsyncIterator[KindInboxBench]:
    """Open an inbox in PostgreSQL with a kind of handler transactions."""
    async with asyncpg.create_pool(kind.database.url, min_size=1, max_size=2) as pool:
        store = await app.open_inbox(kind.database.url, transactions=kind.source)
        try:
            yield KindInboxBench(AdaptedStore(store, plain=kind.plain), ManualClock(), kind, pool)
        finally:
            await store.close()


@asynccontextmanager
async def open_saga_bench(kind: Kind) -> AsyncIterator[KindSagaBench]:
    """Open sagas in PostgreSQL with a kind of handler transactions; the other store uses its own kind."""
    url = kind.database.url
    async with asyncpg.create_pool(url, min_size=1, max_size=4) as pool:
        store, other = await app.open_sagas(url, transactions=kind.source), await app.open_sagas(url)
        try:
            yield KindSagaBench(AdaptedSagas(store, plain=kind.plain), other, ManualClock(), kind, pool)
        finally:
            await store.close()
            await other.close()


async def _awaited(done: Any) -> None:
    if inspect.isawaitable(done):
        await done
