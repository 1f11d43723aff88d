"""MongoDB fails while writers stage and relays drain: conflicts, lost connections, unknown commits, elections.

A relay is killed as well. Nothing is lost, every key keeps its order, and no event counts an attempt.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from tests.acceptance.end_to_end.mongo_shop import MongoShop
from tests.acceptance.end_to_end.relay_progress import EMPTY, STARTED, everything_arrived, until, until_logged
from tests.acceptance.end_to_end.shop import deals
from tests.support.destinations import Destination, KafkaDestination, RabbitDestination
from tests.support.relay_process import RelayProcess, relays

pytestmark = [pytest.mark.mongo, pytest.mark.chaos, pytest.mark.timeout(300)]

KEYS = 100
PACE = ("--lease-seconds", "4", "--publish-timeout-seconds", "1.5", "--batch-max", "100", "--poll-seconds-max", "0.5")
WRITES = ["insert", "update", "delete", "findAndModify"]
IN_DOUBT = {"code": 64, "errmsg": "waiting for replication timed out"}
TIMES = 4
STEP_DOWN_SECONDS = 2
FAULT_MILLISECONDS_MAX = 60_000

FAULTS: dict[str, dict[str, Any]] = {
    "write conflicts": {"failCommands": WRITES, "errorCode": 112},
    "lost connections": {"failCommands": [*WRITES, "find", "aggregate"], "closeConnection": True},
    "commits that nobody heard": {"failCommands": ["commitTransaction"], "closeConnection": True},
    "commits in doubt": {"failCommands": ["commitTransaction"], "writeConcernError": IN_DOUBT},
    "another primary": {"failCommands": [*WRITES, "find", "aggregate", "commitTransaction"], "errorCode": 10107},
}
WRITERS, RELAYS = "shop", "outrider"
"""How the clients are known to the server."""


async def _inject(client: AsyncMongoClient[Any], who: str, fault: dict[str, Any]) -> None:
    """Let some commands of somebody's fail, and return when they have."""
    point = {"configureFailPoint": "failCommand", "mode": {"times": TIMES}, "data": {**fault, "appName": who}}
    before = (await client.admin.command(point))["count"]
    until_failed = {"waitForFailPoint": "failCommand", "timesEntered": before + TIMES}
    await client.admin.command({**until_failed, "maxTimeMS": FAULT_MILLISECONDS_MAX})


async def _step_down(client: AsyncMongoClient[Any]) -> None:
    """Let the only node resign; after a while it elects itself again."""
    resign = {"replSetStepDown": STEP_DOWN_SECONDS, "force": True, "secondaryCatchUpPeriodSecs": 0}
    await client.admin.command(resign)
    # A writer waits for a primary.
    await client["shop"]["resigned"].insert_one({})


async def _all_that_can_go_wrong(client: AsyncMongoClient[Any]) -> None:
    for fault in FAULTS.values():
        for who in (WRITERS, RELAYS):
            await _inject(client, who, fault)
    await _step_down(client)


async def _nothing_changes(shop: MongoShop, destination: Destination, folder: Path) -> None:
    """Sell as long as faults are injected, with a relay killed in the middle."""
    async with relays(shop.url, destination.url, folder, 2, *PACE) as processes:
        await until(shop, processes, *STARTED)
        async with AsyncMongoClient[Any](shop.url) as client:
            faults = asyncio.create_task(_all_that_can_go_wrong(client))
            sold = await _business(shop, destination.topic, faults)
            await processes.pop(0).kill()
            processes.append(await RelayProcess.start(shop.url, destination.url, folder, *PACE))
            faults = asyncio.create_task(_step_down(client))
            sold += await _business(shop, destination.topic, faults, seed=1000)
        await until(shop, processes, *EMPTY)
        # A relay that is stopped before it runs simply ends.
        await until_logged(folder, processes, "relay started", 3)
        assert [await relay.stop() for relay in processes] == [0, 0]
    ledger = await destination.ledger()
    assert len(ledger.ids) == sold
    assert shop.compensated
    await everything_arrived(shop, ledger)


async def _business(shop: MongoShop, topic: str, faults: asyncio.Task[None], *, seed: int = 0) -> int:
    """Sell until the faults are over; return the number of sales."""
    sold = 0
    while not faults.done():
        seed += 1
        await shop.work(deals(2 * KEYS, KEYS, seed=seed), topic)
        sold += 2 * KEYS
    await faults
    return sold


@pytest.mark.kafka
async def test_nothing_is_lost_on_the_way_to_kafka(
    mongo_shop: MongoShop, kafka_destination: KafkaDestination, tmp_path: Path
) -> None:
    await _nothing_changes(mongo_shop, kafka_destination, tmp_path)


@pytest.mark.rabbitmq
async def test_nothing_is_lost_on_the_way_to_rabbitmq(
    mongo_shop: MongoShop, rabbit_destination: RabbitDestination, tmp_path: Path
) -> None:
    await _nothing_changes(mongo_shop, rabbit_destination, tmp_path)
