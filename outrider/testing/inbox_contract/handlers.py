"""Rules about handlers that do what none may: they are told at once, and not called again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import Permanent, UnfitHandler
from outrider.event import Event
from outrider.inbox.inbox import Inbox
from outrider.inbox.router import Route
from outrider.inbox_store import InboxCriteria
from outrider.observer import ConsumerBroken
from outrider.testing.inbox_contract.bench import TOPIC, TYPE, Hand, InboxBench, delivery

ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
THEN = pytest.mark.parametrize("then", ["returns", "raises", "hangs"])


class HandlerRules:
    """A handler has the transaction on loan."""

    @ENDS
    @THEN
    async def test_a_handler_that_ends_the_transaction_breaks_the_consumer(
        self, bench: InboxBench, commit: bool, then: str
    ) -> None:
        billing = _ending(bench, commit=commit, then=then)
        with pytest.raises(UnfitHandler, match=r"_ending.*leave commit and rollback to outrider"):
            await billing.deliver(delivery(1))
        [fact] = bench.notebook.of(ConsumerBroken)
        assert "_ending" in fact.error
        assert await bench.store.desk.dead_letters(InboxCriteria()) == []

    async def test_a_handler_that_ends_the_transaction_of_a_batch_breaks_the_consumer(self, bench: InboxBench) -> None:
        billing = _ending(bench, commit=True, then="raises", batch_max=10)
        with pytest.raises(UnfitHandler):
            await billing.deliver(delivery(1), delivery(1, key="B-1"))

    async def test_a_handler_that_ends_the_transaction_while_its_stream_drains_breaks_the_consumer(
        self, bench: InboxBench
    ) -> None:
        billing = bench.consumer()
        bench.fail("A-1:1", Permanent("broken"))
        await billing.deliver_all([delivery(1), delivery(2)])
        [letter] = await bench.store.desk.dead_letters(InboxCriteria())
        await bench.store.desk.discard([letter["id"]], "ann")
        ending = _ending(bench, commit=True, then="raises")
        await ending.tend()
        async with asyncio.timeout(10):
            with pytest.raises(UnfitHandler, match="leave commit and rollback to outrider"):
                await ending.handling.broken()

    @THEN
    async def test_by_hand_a_handler_that_ends_the_transaction_is_told(self, bench: InboxBench, then: str) -> None:
        inbox = Inbox(bench.store)
        inbox.consumer("billing", handler_timeout_seconds=0.2)
        handler = _ending(bench, commit=True, then=then).routes.handlers[TOPIC, TYPE].handler
        with pytest.raises(UnfitHandler, match="leave commit and rollback to outrider"):
            await inbox.process(delivery(1), handler, consumer="billing")


def _ending(bench: InboxBench, *, commit: bool, then: str, **settings: Any) -> Hand:
    """Make a consumer whose handler ends the transaction, and then ends itself as told."""

    async def end(event: Event, tx: Any) -> None:
        await bench.effect(tx, "half")
        await bench.end(tx, commit=commit)
        if then == "raises":
            raise RuntimeError("and failed")
        if then == "hangs":
            await asyncio.Event().wait()

    hand = bench.consumer(handler_timeout_seconds=0.2, **settings)
    hand.routes.handlers[TOPIC, TYPE] = Route(end)
    return hand
