"""Rules about transactions that are lent to a step's function, and about what may be written of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import UnfitHandler
from outrider.saga_store import Entry, Note, Phase, Progress, Status
from outrider.testing.saga_contract.bench import SagaBench, claim_of

ODD = "j\udcf6rg\0"


async def _yields(_: Any, tx: Any) -> Any:
    yield tx


class LendingRules:
    """Lending a transaction."""

    async def test_what_a_function_returns_comes_back_and_its_transaction_is_saved(self, bench: SagaBench) -> None:
        record = await bench.taken()

        async def create(argument: int, tx: Any) -> int:
            return argument + 1

        async with bench.store.lend() as tx:
            loaded = await bench.store.load(tx, record.instance.saga_id, for_update=True)
            assert loaded is not None
            assert await bench.store.call(create, 1, tx) == 2
            await bench.save_in(tx, loaded, status=Status.RUNNING)
        assert (await bench.shown(record.instance.saga_id)).instance.status is Status.RUNNING

    async def test_a_function_that_ends_its_transaction_is_unfit(self, bench: SagaBench) -> None:
        async def commits(_: Any, tx: Any) -> None:
            await bench.commit(tx)

        with pytest.raises(UnfitHandler, match="leave commit and rollback to outrider"):
            async with bench.store.lend() as tx:
                await bench.store.call(commits, None, tx)

    async def test_a_function_that_nobody_would_run_is_objected_to_and_unfit(self, bench: SagaBench) -> None:
        assert "yield" in (bench.store.objection(_yields) or "")
        assert bench.store.objection(_nothing) is None
        with pytest.raises(UnfitHandler, match="yield"):
            async with bench.store.lend() as tx:
                await bench.store.call(_yields, None, tx)

    async def test_an_exit_that_a_function_asks_for_reaches_whoever_called_it(self, bench: SagaBench) -> None:
        async def leave(_: Any, tx: Any) -> None:
            raise SystemExit("bye")

        with pytest.raises(SystemExit):
            async with bench.store.lend() as tx:
                await bench.store.call(leave, None, tx)
        # The store goes on as before.
        async with bench.store.lend() as tx:
            await bench.store.call(_nothing, None, tx)

    async def test_a_function_that_is_cut_off_leaves_the_store_as_it_was(self, bench: SagaBench) -> None:
        async def hangs(_: Any, tx: Any) -> None:
            await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            async with bench.store.lend() as tx, asyncio.timeout(0.01):
                await bench.store.call(hangs, None, tx)
        async with bench.store.lend() as tx:
            await bench.store.call(_nothing, None, tx)

    async def test_whatever_people_call_themselves_can_be_written(self, bench: SagaBench) -> None:
        record = await bench.taken()
        entry = Entry("reserve", Phase.ACTION, Progress.FAILED, 1, error=ODD)
        note = Note(Status.STARTED, Status.FAILED, "reserve", f"order {ODD}", ODD, ODD)
        await bench.save(record, claim=claim_of(record), last_error=ODD, entries=[entry], notes=[note])
        line = (await bench.store.desk.audit(record.instance.saga_id))[-1]
        assert (line["actor"], line["detail"], line["what"]) == ("j?rg\\0", "j?rg\\0", "order j?rg\\0")
        assert (await bench.shown(record.instance.saga_id)).instance.last_error == "j?rg\\0"


async def _nothing(_: Any, tx: Any) -> None:
    """Do nothing."""
