"""The contracts of the inbox and of the sagas on SQLite, over the kinds of handler transactions there."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from typing import Any

import pytest

from outrider import app
from outrider.drivers import base
from outrider.drivers import sqlite as driver
from outrider.drivers.detect import transaction_source
from outrider.handler_transactions import HandlerTransaction
from outrider.outbox.store import OutboxStore
from outrider.saga.store import SagaStore
from outrider.stores.sqlite import SqliteInbox, SqliteSagas
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, InboxContract, SagaBench
from outrider.testing.contracts.inbox_sequencing import HandlerRules, ReceiptRules
from outrider.testing.contracts.saga_turns import HandlerTransactionRules
from tests.contract.drivers.databases import SqliteDatabase
from tests.contract.handler_transactions.contract_benches import (
    AdaptedSagas,
    AdaptedStore,
    Effects,
    HandlerTransactionKindRules,
    KindInboxBench,
    KindTurnRules,
)
from tests.contract.handler_transactions.transaction_kinds import KINDS, POSTGRES_ONLY, REPEATED, Kind

MAIN = pytest.mark.parametrize("sqlite_kind", KINDS, indirect=True, ids=lambda kind: kind.__name__)
ALL_KINDS = [*KINDS, *(kind for kind in REPEATED if kind not in POSTGRES_ONLY)]
OTHERS = pytest.mark.parametrize("sqlite_kind", ALL_KINDS[len(KINDS) :], indirect=True, ids=lambda kind: kind.__name__)
AWAITED = pytest.mark.parametrize(
    "sqlite_kind", [kind for kind in ALL_KINDS if not kind.plain], indirect=True, ids=lambda kind: kind.__name__
)
"""The kinds whose functions can be ended: one on a thread keeps SQLite's only writer for as long as it likes."""


class HandlerSqliteInboxBench(KindInboxBench):
    """One writer at a time."""

    concurrent = False


class _Inbox:
    @pytest.fixture
    async def bench(self, sqlite_kind: Kind) -> AsyncIterator[InboxBench]:
        assert isinstance(sqlite_kind.database, SqliteDatabase)
        clock = ManualClock(start=datetime.now(UTC))
        store = SqliteInbox(sqlite_kind.database.path, clock=clock)
        await store.use_transactions(transaction_source(sqlite_kind.source))
        yield HandlerSqliteInboxBench(AdaptedStore(store, plain=sqlite_kind.plain), clock, sqlite_kind, None)
        await store.close()


class HandlerSqliteSagaBench(Effects, SagaBench):
    """Sagas written through handler transactions; from outside, through sqlite3."""

    def __init__(self, store: Any, other: SqliteSagas, clock: ManualClock, kind: Kind) -> None:
        super().__init__(store, clock)
        self._other, self._kind = other, kind

    def other(self) -> SagaStore:
        return self._other

    @asynccontextmanager
    async def outside(self) -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._kind.database.url.removeprefix("sqlite:///"))) as conn:
            yield conn

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[OutboxStore]:
        store = await app.open_store(self._kind.database.url, clock=self.clock)
        yield store
        await store.close()

    async def call_driver(self, verb: str, tx: Any, *args: Any) -> Any:
        if isinstance(tx, HandlerTransaction):
            return await base.run(tx, verb, args, "")
        return driver.run(tx, verb, args, "")


class _SagaBench:
    @pytest.fixture
    async def bench(self, sqlite_kind: Kind) -> AsyncIterator[SagaBench]:
        assert isinstance(sqlite_kind.database, SqliteDatabase)
        path, clock = sqlite_kind.database.path, ManualClock(start=datetime.now(UTC))
        store, other = SqliteSagas(path, clock=clock), SqliteSagas(path, clock=clock)
        await store.use_transactions(transaction_source(sqlite_kind.source))
        yield HandlerSqliteSagaBench(AdaptedSagas(store, plain=sqlite_kind.plain), other, clock, sqlite_kind)
        await store.close()
        await other.close()


class _Sagas(_SagaBench, HandlerTransactionKindRules):
    # A driver takes the time from its host, and not from the clock of a store.
    test_entries_are_kept_for_as_long_as_was_said = None
    # A thread cannot be ended; see below.
    test_a_function_that_is_cut_off_leaves_the_store_as_it_was = None


@MAIN
class TestHandlersSqliteInbox(_Inbox, InboxContract):
    pass


@OTHERS
class TestOtherHandlersSqliteInbox(_Inbox, ReceiptRules, HandlerRules):
    pass


@MAIN
class TestHandlersSqliteSagas(_Sagas, KindTurnRules):  # type: ignore[misc]
    pass


@OTHERS
class TestOtherHandlersSqliteSagas(_Sagas, HandlerTransactionRules):  # type: ignore[misc]
    pass


@AWAITED
class TestAwaitedHandlersSqliteSagas(_SagaBench):
    async def test_a_function_that_is_cut_off_leaves_the_store_as_it_was(self, bench: SagaBench) -> None:
        await HandlerTransactionRules().test_a_function_that_is_cut_off_leaves_the_store_as_it_was(bench)
