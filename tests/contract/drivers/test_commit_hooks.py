"""Commit hooks, and their uses: waking relays, and publishing right after the commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from outrider import Outbox, UsageError
from outrider.app import open_store
from outrider.drivers.commit_hooks import after_commit
from outrider.outbox.optimistic import OptimisticWriter
from outrider.testing import MemoryBroker
from tests.contract.drivers.connection_case import Case, RollBack, SyncCase, placed
from tests.contract.drivers.connection_kinds import POSTGRES, SQLITE, Chosen, chosen_of, params

WAIT_SECONDS = 10


@pytest.fixture(params=params(POSTGRES, SQLITE, pooled=False))
def chosen(request: pytest.FixtureRequest) -> Chosen:
    return chosen_of(request)


@pytest.fixture
async def writer(case: Case) -> AsyncIterator[tuple[OptimisticWriter, MemoryBroker]]:
    store, broker, outbox = await open_store(case.database.url), MemoryBroker(), Outbox()
    made = OptimisticWriter(store, broker, outbox.insert, insert_sync=outbox.insert_sync, after_commit=after_commit)
    yield made, broker
    await made.close()
    await store.close()


async def test_a_call_is_made_once_after_the_commit_of_the_outermost_transaction(case: Case) -> None:
    calls: list[str] = []

    def call() -> None:
        calls.append("called")

    async with case.transaction() as conn:
        assert await case.run(after_commit, conn, call) is case.hooked
        async with case.savepoint(conn):
            await case.write(conn, "A")
        assert calls == []
    assert calls == ["called"] * case.hooked
    async with case.transaction() as conn:
        await case.write(conn, "B")
    assert calls == ["called"] * case.hooked


async def test_a_call_is_forgotten_when_the_transaction_rolls_back(case: Case) -> None:
    calls: list[str] = []
    with suppress(RollBack):
        async with case.transaction() as conn:
            await case.run(after_commit, conn, lambda: calls.append("wrong"))
            await case.write(conn, "A")
            raise RollBack
    async with case.transaction() as conn:
        await case.write(conn, "B")
    assert calls == []


async def test_relays_are_woken_after_the_commit_or_shortly_after_staging(case: Case) -> None:
    woken, loop = asyncio.Event(), asyncio.get_running_loop()
    outbox = Outbox(wake=lambda: loop.call_soon_threadsafe(woken.set))
    async with case.transaction() as conn:
        await case.stage(conn, placed(), outbox=outbox)
        if case.hooked:
            # Long enough for a call that does not wait for the commit.
            await asyncio.sleep(0.05)
            assert not woken.is_set()
    async with asyncio.timeout(WAIT_SECONDS):
        await woken.wait()


async def test_an_enlisted_transaction_is_sent_at_once_and_a_rolled_back_one_never(
    case: Case, writer: tuple[OptimisticWriter, MemoryBroker]
) -> None:
    made, broker = writer
    if not case.hooked:
        async with case.transaction() as conn:
            with pytest.raises(UsageError, match=r"does not report its commit; use: async with writer"):
                await case.run(made.enlist, conn)
        return
    with suppress(RollBack):
        async with case.transaction() as conn:
            await _stage(case, made, conn, "gone")
            raise RollBack
    async with case.transaction() as conn:
        await _stage(case, made, conn, "kept")
        assert broker.log == []
    await made.close()
    assert [message.headers["event_type"] for message in broker.log] == ["kept"]


async def _stage(case: Case, writer: OptimisticWriter, conn: object, name: str) -> None:
    batch = await case.run(writer.enlist, conn)
    if isinstance(case, SyncCase):
        await case.run(batch.stage_sync, conn, placed(name))
    else:
        await batch.stage(conn, placed(name))
