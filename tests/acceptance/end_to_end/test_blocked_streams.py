"""An event that cannot be delivered blocks only its own stream; after the repair, a replay unblocks the stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.event import Event
from outrider.testing.servers.rabbitmq import RabbitServer
from tests.acceptance.end_to_end.relay_progress import EMPTY, PACE, STARTED, everything_arrived, outrider, until
from tests.acceptance.end_to_end.shop import PostgresShop, SqliteShop, SqlShop, deals, event
from tests.support.destinations import Destination, KafkaDestination, RabbitDestination
from tests.support.relay_process import RelayProcess, relays

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

GUILTY = ("g0", "g1", "g2")
GOOD = 3000
LIMIT_BYTES = 20_000

Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scene:
    """A shop, a broker that rejects some events, and relays between them."""

    shop: SqlShop
    destination: Destination
    processes: list[RelayProcess]

    async def mix(self, failing: Sequence[Event]) -> None:
        """Stage events that will fail among many that will not."""
        half = len(failing) // 2
        for number, some in enumerate((failing[:half], failing[half:], ())):
            await self.shop.work(deals(GOOD // 3, 100, seed=number), self.destination.topic)
            await self.shop.transact(some)

    async def until_only_the_guilty_wait(self, parked: int) -> None:
        """Wait until all other events are delivered; the failing streams are blocked, and their next events parked."""
        waiting = f"SELECT count(*) = {parked} AND sum(CASE state WHEN 'parked' THEN 1 END) = {parked} FROM outbox"
        await until(self.shop, self.processes, "all others to be delivered", lambda _: self.shop.ask(waiting))
        assert await self.shop.count("outbox_dead_letter") == len(GUILTY)
        assert {row[0] for row in await self.shop.rows("SELECT key FROM outbox")} == set(GUILTY)
        held = await self.shop.rows("SELECT key, cause FROM outbox_blocked")
        assert sorted(map(tuple, held)) == [(key, "dead_letter") for key in GUILTY]

    async def replay(self) -> None:
        """Replay the dead letters, and wait until the outbox is empty."""
        said = await outrider("dead-letters", "replay", "--all", "--yes", "--store", self.shop.url)
        assert said == {"replayed": len(GUILTY)}
        await until(self.shop, self.processes, *EMPTY)


async def _only_the_guilty_wait(
    scene: Scene, stream: Callable[[str], list[Event]], repair: Step, *, fine: int = 0
) -> None:
    """Each failing stream has some good events, then a failing one, then more good ones."""
    streams = {key: stream(key) for key in GUILTY}
    parked = sum(len(events) - fine - 1 for events in streams.values())
    await scene.mix([one for events in streams.values() for one in events])
    await scene.until_only_the_guilty_wait(parked)
    ledger = await scene.destination.ledger()
    assert [ledger.order[key] for key in GUILTY] == [list(range(1, fine + 1))] * len(GUILTY)
    assert len(ledger.ids) == GOOD + fine * len(GUILTY)
    # Whatever comes later to a held stream waits as well.
    await scene.shop.transact([events[-1] for events in streams.values()])
    await scene.until_only_the_guilty_wait(parked + len(GUILTY))
    await repair()
    await scene.replay()
    await everything_arrived(scene.shop, await scene.destination.ledger())


@pytest.mark.postgres
@pytest.mark.rabbitmq
async def test_a_routing_key_without_a_queue_makes_only_its_own_streams_wait(
    postgres_shop: PostgresShop, rabbitmq_url: str, tmp_path: Path
) -> None:
    destination = RabbitDestination(rabbitmq_url, "refunds")

    async def bound(yes: bool) -> None:
        async with destination.channel() as channel:
            queue = await channel.get_queue(destination.name)
            await (queue.bind if yes else queue.unbind)(destination.name, "refunds")

    async with relays(postgres_shop.url, destination.url, tmp_path, 2, *PACE) as processes:
        await until(postgres_shop, processes, *STARTED)
        await bound(False)
        scene = Scene(postgres_shop, destination, processes)
        await _only_the_guilty_wait(scene, lambda key: [event(key, "refunds") for _ in range(5)], lambda: bound(True))
    await destination.remove()


@pytest.mark.kafka
async def test_a_missing_topic_makes_only_its_own_streams_wait(
    sqlite_shop: SqliteShop, kafka_destination: KafkaDestination, tmp_path: Path
) -> None:
    missing = f"{kafka_destination.topic}-later"

    async def repair() -> None:
        await asyncio.to_thread(kafka_destination.add, missing)

    async with relays(sqlite_shop.url, kafka_destination.url, tmp_path, 2, *PACE) as processes:
        await until(sqlite_shop, processes, *STARTED)
        scene = Scene(sqlite_shop, kafka_destination, processes)
        await _only_the_guilty_wait(scene, lambda key: [event(key, missing) for _ in range(5)], repair)


def _with_one_too_large(key: str, topic: str) -> list[Event]:
    noise = random.Random(key).randbytes(LIMIT_BYTES).hex()
    return [event(key, topic), event(key, topic, {"noise": noise}), *(event(key, topic) for _ in range(4))]


@pytest.mark.postgres
@pytest.mark.kafka
async def test_an_event_too_large_for_kafka_makes_only_its_own_stream_wait(
    postgres_shop: PostgresShop, kafka: str, tmp_path: Path
) -> None:
    destination = KafkaDestination(kafka, max_message_bytes=str(LIMIT_BYTES))

    async def repair() -> None:
        await asyncio.to_thread(destination.configure, "max.message.bytes", "1000000")

    # Kafka applies its limit to batches too, so those must stay below it.
    url = f"{destination.url}?batch.size={LIMIT_BYTES // 2}"
    async with relays(postgres_shop.url, url, tmp_path, 2, *PACE) as processes:
        await until(postgres_shop, processes, *STARTED)
        scene = Scene(postgres_shop, destination, processes)
        await _only_the_guilty_wait(scene, lambda key: _with_one_too_large(key, destination.topic), repair, fine=1)
    await destination.remove()


@pytest.mark.rabbitmq
async def test_an_event_too_large_for_rabbitmq_makes_only_its_own_stream_wait(
    sqlite_shop: SqliteShop, tmp_path: Path
) -> None:
    with RabbitServer(settings={"max_message_size": str(LIMIT_BYTES)}) as server:
        destination = RabbitDestination(server.url)

        async def repair() -> None:
            await asyncio.to_thread(server.halt)
            server.settings["max_message_size"] = "1000000"
            await asyncio.to_thread(server.start)

        async with relays(sqlite_shop.url, destination.url, tmp_path, 2, *PACE) as processes:
            await until(sqlite_shop, processes, *STARTED)
            scene = Scene(sqlite_shop, destination, processes)
            await _only_the_guilty_wait(scene, lambda key: _with_one_too_large(key, destination.topic), repair, fine=1)
