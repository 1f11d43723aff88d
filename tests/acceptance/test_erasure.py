"""An erasure after events have gone to real brokers: the value of a canary is nowhere, and cannot be decrypted."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from outrider import Event
from outrider.app import Outbox, open_broker, stored_subject_keys
from outrider.errors import SubjectErased
from outrider.event import Message
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.payload import Payloads
from outrider.privacy import DataKey, FieldEncryption, KeyRing, SubjectKeys
from outrider.testing.contracts.erasure import ANN, BOB, CANARY, EMAIL, NEIGHBOUR, ErasureBench
from tests.support.destinations import Destination, KafkaDestination, RabbitDestination
from tests.support.erasure_benches import mongo_bench, postgres_bench, sqlite_bench
from tests.support.kafka_client import read
from tests.support.key_rings import ListedKeys
from tests.support.rabbitmq_client import contents

pytestmark = [pytest.mark.timeout(180)]

EVENTS = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """A database, its URL for commands, and the keys of all processes."""

    bench: ErasureBench
    url: str
    master: KeyRing
    ring: KeyRing
    opened: list[SubjectKeys]

    def payloads(self) -> Payloads:
        """Return the payloads of another process: addresses are encrypted for each subject."""
        subjects = stored_subject_keys(self.url, master=self.master)
        self.opened.append(subjects)
        sensitive = {"order.billed": ["email"]}
        return Payloads(encryption=FieldEncryption(keys=self.ring, sensitive=sensitive, subjects=subjects))

    async def publish(self, destination: Destination) -> None:
        """Publish encrypted events of two subjects to a real broker."""
        payloads, harness = self.payloads(), self.bench.harness
        outbox = Outbox(payloads=payloads)
        # The keys are made before the transaction: SQLite has one writer.
        await payloads.load([], subjects=[("order.billed", subject) for subject in (ANN, BOB)])
        for subject in (ANN, BOB):
            payload = {"email": EMAIL[subject], "total": 12}
            events = [
                Event("order.billed", payload, topic=destination.topic, key=f"{subject} {n}", subject=subject)
                for n in range(EVENTS)
            ]
            await harness.transact(lambda conn, events=events: outbox.stage(conn, *events))  # type: ignore[misc]
        broker = await open_broker(destination.url)
        await broker.start()
        settings = RelaySettings(workers=1)
        relay = Relay(harness.store, broker, settings, clock=harness.clock, payloads=payloads)
        while (await harness.store.admin.counts()).get("pending"):
            await harness.works(relay)
        await harness.store.release(relay.ownership.lease)
        await broker.close()

    async def command(self, *arguments: str, code: int = 0) -> Any:
        """Run a command of Outrider as an operator does; return its result."""
        given = ["-m", "outrider", *arguments, "--store", self.url, "--json"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *given, stdout=pipe, stderr=pipe)
        said, errors = await process.communicate()
        assert process.returncode == code, (said, errors)
        return json.loads(said)


@asynccontextmanager
async def scene_of(bench: ErasureBench, url: str) -> AsyncIterator[Scene]:
    master, ring = (KeyRing(ListedKeys(DataKey.new(name))) for name in ("master", "ring"))
    scene = Scene(bench, url, master, ring, [])
    yield scene
    for subjects in scene.opened:
        subjects.close()


@pytest.fixture
async def on_postgres(postgres_url: str) -> AsyncIterator[Scene]:
    async with postgres_bench(postgres_url) as bench, scene_of(bench, postgres_url) as scene:
        yield scene


@pytest.fixture
async def on_mongo(mongo_default: str) -> AsyncIterator[Scene]:
    async with mongo_bench(mongo_default) as bench, scene_of(bench, mongo_default) as scene:
        yield scene


@pytest.fixture
async def on_sqlite(sqlite_path: Path) -> AsyncIterator[Scene]:
    async with sqlite_bench(sqlite_path) as bench, scene_of(bench, f"sqlite:///{sqlite_path}") as scene:
        yield scene


@pytest.fixture
async def kafka_topic(kafka: str) -> AsyncIterator[KafkaDestination]:
    destination = KafkaDestination(kafka)
    yield destination
    await destination.remove()


@pytest.fixture
async def rabbit_queue(rabbitmq_url: str) -> AsyncIterator[RabbitDestination]:
    destination = RabbitDestination(rabbitmq_url)
    yield destination
    await destination.remove()


async def _messages(destination: Destination) -> list[Message]:
    """Read back everything that the broker has, in the order of ids."""
    if isinstance(destination, KafkaDestination):
        found = await asyncio.to_thread(read, destination.bootstrap, destination.topic)
    else:
        assert isinstance(destination, RabbitDestination)
        found = await contents(destination.server_url, destination.name)
    return sorted(found, key=lambda message: message.message_id)


async def _nothing_is_left(scene: Scene, destination: Destination) -> None:
    """Erase a subject by command, then search everything."""
    bench = scene.bench
    await scene.publish(destination)
    await bench.fill(ANN)
    await bench.fill(BOB)
    neighbour = await bench.readable(NEIGHBOUR)
    sent = await _messages(destination)
    assert len(sent) == 2 * EVENTS
    reader = scene.payloads()
    assert [await _opens(reader, each) == EMAIL[each.headers["subject"]] for each in sent] == [True] * len(sent)

    planned = await scene.command("erase", "--subject", ANN, "--dry-run")
    assert sum(row["rows"] for row in planned["would_erase"]) == 6 + EVENTS
    left = await scene.command("erase", "--subject", ANN, "--verify", code=1)
    assert left["found"] == planned["would_erase"]
    [receipt] = await scene.command("erase", "--subject", ANN, "--yes", "--as", "ann")
    assert receipt["complete"]
    assert receipt["erased"]["archived event"] == 3 + EVENTS
    assert receipt["readable"] == {"order.placed": 3}
    [key] = receipt["keys_destroyed"]
    assert await scene.command("erase", "--subject", ANN, "--verify") == {"found": [], "in_the_way": []}

    assert await bench.readable(CANARY) == []
    assert await bench.readable(f'"{ANN}"') == []
    assert await bench.readable(NEIGHBOUR) == neighbour
    after = await _messages(destination)
    assert [(each.message_id, each.body) for each in after] == [(each.message_id, each.body) for each in sent]
    # A process may use a key that it knows for a minute more; this one has just started.
    reader = scene.payloads()
    for message in after:
        assert CANARY.encode() not in message.body + json.dumps(message.headers).encode()
        if message.headers["subject"] == BOB:
            assert await _opens(reader, message) == NEIGHBOUR
        else:
            assert key in message.body.decode()
            with pytest.raises(SubjectErased):
                await _opens(reader, message)

    assert (await scene.command("audit", "verify"))["without_details"] == 2
    rows = await bench.dump()
    [again] = await scene.command("erase", "--subject", ANN, "--yes", "--as", "bob")
    assert again["repeated"]
    assert (again["finished_at"], again["actor"]) == (receipt["finished_at"], "ann")
    assert await bench.dump() == rows


async def _opens(payloads: Payloads, message: Message) -> str:
    """Open a message as a consumer with all keys; return the address."""
    headers, payload = message.headers, json.loads(message.body)
    identity = UUID(headers["message_id"])
    event = Event(headers["event_type"], payload, event_id=identity, headers=headers, subject=headers["subject"])
    opened = await asyncio.to_thread(payloads.open, event)
    return str(opened.payload["email"])


@pytest.mark.postgres
@pytest.mark.kafka
async def test_nothing_is_left_on_postgresql_and_kafka(on_postgres: Scene, kafka_topic: KafkaDestination) -> None:
    await _nothing_is_left(on_postgres, kafka_topic)


@pytest.mark.postgres
@pytest.mark.rabbitmq
async def test_nothing_is_left_on_postgresql_and_rabbitmq(on_postgres: Scene, rabbit_queue: RabbitDestination) -> None:
    await _nothing_is_left(on_postgres, rabbit_queue)


@pytest.mark.mongo
@pytest.mark.kafka
async def test_nothing_is_left_on_mongodb_and_kafka(on_mongo: Scene, kafka_topic: KafkaDestination) -> None:
    await _nothing_is_left(on_mongo, kafka_topic)


@pytest.mark.rabbitmq
async def test_nothing_is_left_on_sqlite_and_rabbitmq(on_sqlite: Scene, rabbit_queue: RabbitDestination) -> None:
    await _nothing_is_left(on_sqlite, rabbit_queue)
