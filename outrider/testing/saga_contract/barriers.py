"""Rules about a participant's barrier: once for a key, and nothing after it was undone."""

from __future__ import annotations

import asyncio

import pytest

from outrider.saga_store import Entered, Phase
from outrider.testing.saga_contract.bench import SagaBench

KEY = "saga-1:reserve"
REPLY = b'{"reservation": "R-1", "name": "\xc3\xa9"}'
FRESH = Entered(fresh=True, barred=False)


async def _enter(bench: SagaBench, phase: Phase, *, reply: bytes | None = None, key: str = KEY) -> Entered:
    """Let a command in, in a transaction of its own; keep a reply, if there is one."""
    async with bench.store.transaction() as tx:
        entered: Entered = await bench.drive("barrier_enter", tx, "stock", key, phase)
        if entered.fresh and reply is not None:
            await bench.drive("barrier_keep", tx, "stock", key, phase, reply)
    return entered


class BarrierRules:
    """What a participant does with a command."""

    async def test_a_command_that_comes_first_is_let_in(self, bench: SagaBench) -> None:
        assert await _enter(bench, Phase.ACTION, reply=REPLY) == FRESH
        assert await _enter(bench, Phase.ACTION, key="saga-2:reserve") == FRESH

    @pytest.mark.parametrize("phase", list(Phase))
    async def test_a_repeated_command_gets_the_stored_reply(self, bench: SagaBench, phase: Phase) -> None:
        if phase is Phase.COMPENSATION:
            await _enter(bench, Phase.ACTION, reply=b'"done"')
        assert await _enter(bench, phase, reply=REPLY) == FRESH
        for _ in range(2):
            assert await _enter(bench, phase) == Entered(fresh=False, barred=False, reply=REPLY)

    async def test_a_compensation_after_its_action_is_let_in(self, bench: SagaBench) -> None:
        await _enter(bench, Phase.ACTION, reply=REPLY)
        assert await _enter(bench, Phase.COMPENSATION, reply=b'"released"') == FRESH
        assert (await _enter(bench, Phase.ACTION)).reply == REPLY

    async def test_a_compensation_before_its_action_bars_it(self, bench: SagaBench) -> None:
        assert await _enter(bench, Phase.COMPENSATION, reply=REPLY) == Entered(fresh=True, barred=True)
        for _ in range(2):
            assert await _enter(bench, Phase.ACTION) == Entered(fresh=False, barred=True)
        again = await _enter(bench, Phase.COMPENSATION)
        assert again == Entered(fresh=False, barred=True, reply=REPLY)

    async def test_a_command_that_is_rolled_back_has_not_come(self, bench: SagaBench) -> None:
        for phase in (Phase.ACTION, Phase.COMPENSATION):
            async with bench.rolled_back() as tx:
                assert (await bench.drive("barrier_enter", tx, "stock", KEY, phase)).fresh
                await bench.drive("barrier_keep", tx, "stock", KEY, phase, REPLY)
        assert await _enter(bench, Phase.ACTION) == FRESH

    async def test_participants_have_barriers_of_their_own(self, bench: SagaBench) -> None:
        await _enter(bench, Phase.COMPENSATION)
        async with bench.store.transaction() as tx:
            assert await bench.drive("barrier_enter", tx, "bank", KEY, Phase.ACTION) == FRESH

    async def test_the_same_command_in_two_transactions_at_once_is_let_in_once(self, bench: SagaBench) -> None:
        entered = await asyncio.gather(*(_enter(bench, Phase.ACTION, reply=REPLY) for _ in range(2)))
        assert sorted(one.fresh for one in entered) == [False, True]
        assert {one.reply for one in entered} == {None, REPLY}

    async def test_of_action_and_compensation_at_once_the_second_knows_of_the_first(self, bench: SagaBench) -> None:
        action, undo = await asyncio.gather(_enter(bench, Phase.ACTION), _enter(bench, Phase.COMPENSATION))
        assert undo.fresh
        assert action.fresh is not undo.barred

    async def test_a_transaction_sees_its_own_reply(self, bench: SagaBench) -> None:
        async with bench.store.transaction() as tx:
            assert await bench.drive("barrier_enter", tx, "stock", KEY, Phase.ACTION) == FRESH
            await bench.drive("barrier_keep", tx, "stock", KEY, Phase.ACTION, REPLY)
            again = await bench.drive("barrier_enter", tx, "stock", KEY, Phase.ACTION)
        assert again == Entered(fresh=False, barred=False, reply=REPLY)
