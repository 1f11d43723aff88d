"""Consumers and saga workers on MongoDB, as people run them, killed again and again: every effect happens once."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient

import outrider
from outrider import Event
from outrider.stores.mongo import MongoSchema
from outrider.testing.servers.kafka import create_topic, delete_topics
from outrider.testing.servers.mongo import MongoServer
from tests.acceptance.end_to_end.mongo_shop import FORGETFUL
from tests.support import mongo_services as services
from tests.support.relay_process import PATIENCE_SECONDS, at, relays
from tests.support.sizes import sized

pytestmark = [pytest.mark.mongo, pytest.mark.chaos, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
KEYS = [f"k{number:02}" for number in range(20)]
PER_KEY = sized(20, 6)
KILLS = sized(4, 2)
POLL_SECONDS = 0.05
SAGAS = {services.FINE: sized(60, 12), services.SOLD_OUT: sized(10, 4), services.DECLINED: sized(10, 4)}


@dataclass(frozen=True, slots=True)
class Scene:
    """A database, a broker, and the services that a test runs between them."""

    client: AsyncMongoClient[Any]
    url: str
    broker: str
    folder: Path

    @asynccontextmanager
    async def running(self, *command: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a command of Outrider around the block; whatever is left of it at the end is killed."""
        options = ["--store", self.url, "--broker", self.broker, "--log-level", "error", "--parent", str(os.getpid())]
        with (self.folder / "services.log").open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "outrider", *command, *options),
                stdout=log_file,
                stderr=log_file,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        try:
            yield process
        except BaseException:
            print((self.folder / "services.log").read_text()[-10_000:])
            raise
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def until(self, what: str, true: Callable[[], Awaitable[bool]]) -> None:
        """Ask again and again, which is all one can do about another process."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + PATIENCE_SECONDS
        while not await true():
            assert clock.time() < deadline, f"after {PATIENCE_SECONDS:g} s still waiting for {what}"
            await asyncio.sleep(POLL_SECONDS)

    async def until_written(self, count: int) -> None:
        """Wait until so many lines are in the ledger."""

        async def written() -> bool:
            return await self.client[services.DATABASE]["ledger"].count_documents({}) >= count

        await self.until(f"{count} effects", written)

    async def transact(self, work: Callable[[Any], Awaitable[None]]) -> None:
        """Do something in a transaction, as an application has one."""
        async with self.client.start_session() as session:
            await session.with_transaction(work)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that soon forgets what a killed process had open."""
    with MongoServer(settings=FORGETFUL) as server:
        asyncio.run(MongoSchema(server.url).migrate())
        yield server.url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    async with AsyncMongoClient[Any](url, uuidRepresentation="standard") as client:
        for name in ("consumer_inbox", "inbox_stream", "outbox_archive", "outbox_counter"):
            await client["outrider"][name].delete_many({})
        await client.drop_database(services.DATABASE)
        await client[services.DATABASE].create_collection("ledger")
        yield client
        await client.drop_database(services.DATABASE)


async def _consumers_repeat_no_effect(scene: Scene) -> None:
    """Publish numbered events; then kill consumers in the middle of them, and let a last one finish."""

    async def place(session: Any) -> None:
        for _ in range(PER_KEY):
            events = [Event(services.TYPE, {}, topic=services.TOPIC, key=key, sequence="auto") for key in KEYS]
            await outrider.stage(session, *events)

    await scene.transact(place)
    async with relays(scene.url, scene.broker, scene.folder, 1) as [relay]:
        outbox = scene.client["outrider"]["outbox"]

        async def published() -> bool:
            return await outbox.count_documents({}) == 0

        await scene.until("an empty outbox", published)
        assert await relay.stop() == 0
    total = len(KEYS) * PER_KEY
    for turn in range(KILLS):
        async with scene.running("consume", f"{services.__name__}:billing") as consumer:
            await scene.until_written((turn + 1) * total // (KILLS + 2))
            consumer.kill()
            assert await consumer.wait() < 0, "it was to be killed in the middle of its work"
    async with scene.running("consume", f"{services.__name__}:billing", "--until-idle", "3") as last:
        assert await last.wait() == 0
    assert await services.ledgers(scene.client) == {key: {"bill": list(range(1, PER_KEY + 1))} for key in KEYS}
    inbox = scene.client["outrider"]
    assert await inbox["consumer_inbox"].count_documents({}) == total
    assert await inbox["inbox_dead_letter"].count_documents({}) == await inbox["inbox_held"].count_documents({}) == 0


async def test_killed_consumers_of_the_embedded_log_repeat_no_effect(
    client: AsyncMongoClient[Any], url: str, tmp_path: Path
) -> None:
    await _consumers_repeat_no_effect(Scene(client, url, at(tmp_path / "log.db"), tmp_path))


@pytest.mark.kafka
async def test_killed_consumers_of_kafka_repeat_no_effect(
    client: AsyncMongoClient[Any], url: str, kafka: str, tmp_path: Path
) -> None:
    create_topic(kafka, services.TOPIC, partitions=4)
    try:
        broker = f"kafka://{kafka}?session.timeout.ms=1000"
        await _consumers_repeat_no_effect(Scene(client, url, broker, tmp_path))
    finally:
        delete_topics(kafka, services.TOPIC)


async def test_sagas_end_well_though_their_workers_are_killed(
    client: AsyncMongoClient[Any], url: str, tmp_path: Path
) -> None:
    scene = Scene(client, url, at(tmp_path / "log.db"), tmp_path)
    names = [f"{kind}-{number:03}" for kind, count in SAGAS.items() for number in range(count)]
    instances = client["outrider"]["saga_instance"]

    async def place(session: Any) -> None:
        for name in names:
            await services.order.start(session, services.Order(name), correlation_id=name)

    async def ended(count: int) -> bool:
        return await instances.count_documents({"status": {"$in": ["completed", "compensated", "failed"]}}) >= count

    await scene.transact(place)
    run = ("saga", "run", f"{services.__name__}:sagas", "--lease-seconds", "3", "--poll-seconds-max", "0.2")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(relays(scene.url, scene.broker, scene.folder, 1, "--poll-seconds-max", "0.2"))
        await stack.enter_async_context(scene.running("consume", f"{services.__name__}:stock"))
        async with scene.running(*run) as worker:
            await scene.until("a quarter of the sagas", lambda: ended(len(names) // 4))
            worker.kill()
            await worker.wait()
        async with scene.running(*run) as worker:
            await scene.until("all sagas", lambda: ended(len(names)))
            worker.terminate()
            assert await worker.wait() == 0
    found = {row["correlation_id"]: row["status"] async for row in instances.find()}
    assert found == {name: services.EXPECTED[name.rpartition("-")[0]][0] for name in names}
    completed = SAGAS[services.FINE]
    assert Counter(found.values()) == {"completed": completed, "compensated": len(names) - completed}
    written = await services.ledgers(client)
    assert written == {name: services.EXPECTED[name.rpartition("-")[0]][1] for name in names}
