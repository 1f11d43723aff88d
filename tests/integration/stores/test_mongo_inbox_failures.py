"""Failures of server and network under an inbox on MongoDB: in the end each effect is there exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from outrider.event import Delivery
from outrider.inbox.model import InboxCriteria
from outrider.retry import RetryPolicy
from outrider.stores.mongo import MongoInbox, handler_transactions
from outrider.stores.mongo.database import RetryBudget
from outrider.telemetry.events import ConsumerUnavailable
from outrider.testing import ManualClock
from outrider.testing.contracts import delivery
from outrider.testing.harness import ConsumerHarness
from tests.support.mongo_benches import SHOP, MongoInboxBench

pytestmark = pytest.mark.mongo

UNLUCKY = "unlucky"
TRANSIENT, UNKNOWN = ["TransientTransactionError"], ["UnknownTransactionCommitResult"]
Fault = dict[str, Any]

CONFLICT: Fault = {"errorCode": 112, "errorLabels": TRANSIENT}
STEPPED_DOWN: Fault = {"errorCode": 10107, "errorLabels": TRANSIENT}
CUT_OFF: Fault = {"closeConnection": True}
# The command is carried out all the same, after the driver has given up on it.
LATE: Fault = {"blockConnection": True, "blockTimeMS": 600}
COMMIT_LOST: Fault = {"errorCode": 50, "errorLabels": UNKNOWN}
# Also this one is carried out.
COMMIT_DONE: Fault = {"writeConcernError": {"code": 64, "errmsg": "not replicated in time"}, "errorLabels": UNKNOWN}

STRICT = RetryPolicy(max_attempts=1)
"""One counted attempt makes an event a dead letter."""


@pytest.fixture
async def admin(mongo_default: str) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    """A client that no fault hits."""
    async with AsyncMongoClient[dict[str, Any]](mongo_default) as client:
        await client[SHOP].create_collection("effects")
        yield client
        await client.drop_database(SHOP)


@pytest.fixture
async def bench(mongo_default: str, admin: AsyncMongoClient[dict[str, Any]]) -> AsyncIterator[MongoInboxBench]:
    url = f"{mongo_default}&appName={UNLUCKY}&socketTimeoutMS=300"
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        yield MongoInboxBench(MongoInbox.over(client), ManualClock(start=datetime.now(UTC)), admin)


class Faults:
    """Lets commands fail, and counts how many have."""

    def __init__(self, admin: AsyncMongoClient[dict[str, Any]]) -> None:
        self._admin, self._before = admin, 0

    async def begin(self, command: str | list[str], fault: Fault, mode: Any) -> None:
        commands = [command] if isinstance(command, str) else command
        data = {"failCommands": commands, "appName": UNLUCKY, **fault}
        self._before = await self._set(mode=mode, data=data)

    async def end(self) -> int:
        """Switch them off; return how often one has struck."""
        return await self._set(mode="off") - self._before

    async def _set(self, **options: Any) -> int:
        done = await self._admin.admin.command({"configureFailPoint": "failCommand", **options})
        count: int = done["count"]
        return count


@pytest.fixture
async def faults(admin: AsyncMongoClient[dict[str, Any]]) -> AsyncIterator[Faults]:
    faults = Faults(admin)
    yield faults
    await faults.end()


async def _no_attempt_was_counted(bench: MongoInboxBench) -> None:
    assert await bench.store.admin.dead_letters(InboxCriteria()) == []
    counts = await bench.store.admin.counts("billing")
    assert counts == {"waiting": 0, "blocked_streams": 0, "dead_letters": 0}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("command", ["update", "findAndModify", "insert", "commitTransaction"])
@pytest.mark.parametrize("fault", [CONFLICT, STEPPED_DOWN, CUT_OFF, LATE], ids=["conflict", "stepdown", "cut", "late"])
async def test_a_failure_in_any_command_counts_no_attempt_and_the_effect_is_there_once(
    bench: MongoInboxBench, faults: Faults, command: str, fault: Fault, times: int
) -> None:
    billing = bench.consumer(retry=STRICT, ordering="monotonic")
    await faults.begin(command, fault, {"times": times})
    await billing.deliver_all([delivery(1), delivery(2)])
    assert await faults.end() == times
    assert await bench.effects() == ["A-1:1", "A-1:2"]
    await _no_attempt_was_counted(bench)


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("fault", [COMMIT_LOST, COMMIT_DONE], ids=["lost", "done"])
async def test_an_unknown_commit_is_repeated_until_it_is_known(
    bench: MongoInboxBench, faults: Faults, fault: Fault, times: int
) -> None:
    billing, once = bench.consumer(retry=STRICT), delivery(1)
    await faults.begin("commitTransaction", fault, {"times": times})
    assert await billing.deliver(once) == 1
    assert await faults.end() == times
    assert await billing.deliver(once) == 1
    assert await bench.effects() == ["A-1:1"]


@pytest.mark.parametrize(("fault", "effects"), [(COMMIT_LOST, []), (COMMIT_DONE, ["A-1:1"])], ids=["lost", "done"])
async def test_a_commit_that_stays_unknown_leaves_the_event_with_the_broker_and_the_receipt_decides(
    bench: MongoInboxBench,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    effects: list[str],
) -> None:
    monkeypatch.setattr(handler_transactions, "RetryBudget", partial(RetryBudget, 0.2))
    billing, once = bench.consumer(retry=STRICT), delivery(1)
    await faults.begin("commitTransaction", fault, "alwaysOn")
    assert await billing.deliver(once) == 0
    assert bench.observer.of(ConsumerUnavailable)
    await faults.end()
    assert await bench.effects() == effects
    assert await billing.deliver(once) == 1
    assert await bench.effects() == ["A-1:1"]
    await _no_attempt_was_counted(bench)


@pytest.mark.parametrize("command", ["update", "delete", "find", "commitTransaction"])
@pytest.mark.parametrize("fault", [CONFLICT, CUT_OFF], ids=["conflict", "cut"])
async def test_a_temporary_failure_is_hidden_from_the_operator(
    bench: MongoInboxBench, faults: Faults, command: str, fault: Fault
) -> None:
    billing = bench.consumer(retry=STRICT)
    bench.fail("A-1:1", RuntimeError("broken"))
    await billing.deliver_all([delivery(1), delivery(2)])
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    await faults.begin(command, fault, {"times": 1})
    assert await bench.store.admin.replay([dead_letter["id"]], "ann") == 1
    assert await faults.end() == 1
    await billing.drain()
    assert await bench.effects() == ["A-1:1", "A-1:2"]


@pytest.mark.parametrize("fault", [CONFLICT, CUT_OFF], ids=["conflict", "cut"])
async def test_a_draining_stream_survives_failures_and_keeps_its_order(
    bench: MongoInboxBench, faults: Faults, fault: Fault
) -> None:
    billing = bench.consumer(ordering="strict", first_sequence="one", retry=STRICT)
    await billing.deliver_all([delivery(n) for n in (2, 3, 4, 5)])
    await faults.begin("update", fault, {"times": 3})
    await billing.deliver_all([delivery(1)])
    assert await faults.end() == 3
    assert await bench.effects() == [f"A-1:{n}" for n in range(1, 6)]
    await _no_attempt_was_counted(bench)


async def _until_acked(hand: ConsumerHarness, one: Delivery) -> None:
    async with asyncio.timeout(60):
        while not await hand.deliver(one):
            pass


@pytest.mark.parametrize("fault", [CONFLICT, STEPPED_DOWN, CUT_OFF], ids=["conflict", "stepdown", "cut"])
async def test_in_a_storm_of_failures_every_event_is_applied_once_and_in_order(
    bench: MongoInboxBench, faults: Faults, fault: Fault
) -> None:
    """Two consumers get every delivery at the same time, and one command in ten fails."""
    crew = [bench.consumer(retry=STRICT, ordering="monotonic") for _ in range(2)]
    # A conflict that a commit runs into ends the transaction; one that is only pretended would leave it open.
    commands = ["update", "findAndModify", "insert", *(["commitTransaction"] if fault is not CONFLICT else [])]
    await faults.begin(commands, fault, {"activationProbability": 0.1})
    for number in range(1, 9):
        batch = [delivery(number, key=key) for key in ("A", "B")]
        await asyncio.gather(*(_until_acked(hand, one) for hand in crew for one in batch))
    assert await faults.end() > 0
    effects = await bench.effects()
    for key in "AB":
        assert [text for text in effects if text.startswith(key)] == [f"{key}:{n}" for n in range(1, 9)]
    await _no_attempt_was_counted(bench)
