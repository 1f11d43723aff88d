"""`outrider relay --config FILE` as a process of its own, for every pair of a store and a broker."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aio_pika
import asyncpg
import pytest
from confluent_kafka.admin import AdminClient

import outrider
from outrider import Event
from outrider.brokers.embedded import EmbeddedBroker
from outrider.stores.sqlite import SqliteSchema
from outrider.testing.servers.kafka import create_topic
from tests.support.kafka_client import read as read_kafka
from tests.support.rabbitmq_client import read_back

TOPIC = f"orders-{uuid4().hex[:12]}"
EVENTS = [Event("order.placed", {"n": n}, topic=TOPIC, key=f"k{n % 3}") for n in range(12)]


@dataclass(frozen=True, slots=True)
class Store:
    """The settings of a store in the file, and the way to stage into it."""

    url: str
    stage: Callable[[], Awaitable[None]]
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Broker:
    """The settings of a broker in the file, and the way to read the published messages."""

    url: str
    read: Callable[[], Awaitable[list[bytes]]]
    options: tuple[str, ...] = ()


@pytest.fixture(
    params=[
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("pgbouncer", marks=[pytest.mark.postgres, pytest.mark.pgbouncer]),
        "sqlite",
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "sqlite":
        return _sqlite(tmp_path / "outbox.db")
    store = _postgres(request.getfixturevalue("postgres_url"))
    if request.param == "postgres":
        return store
    pooler = urlsplit(request.getfixturevalue("pgbouncer_url"))
    return Store(pooler._replace(path=urlsplit(store.url).path).geturl(), store.stage, ("  pooled: true",))


@pytest.fixture(
    params=[
        pytest.param("kafka", marks=pytest.mark.kafka),
        pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
        "embedded",
    ]
)
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Broker:
    if request.param == "kafka":
        return _kafka(request.getfixturevalue("kafka"))
    if request.param == "rabbitmq":
        return _rabbitmq(request.getfixturevalue("rabbitmq_url"))
    return _embedded(tmp_path / "log.db")


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_relay_that_a_file_configures_delivers(
    store: Store, wire: Broker, processes: int, tmp_path: Path
) -> None:
    before = len(await wire.read())
    await store.stage()
    lines = ["store:", "  url: ${STORE_URL}", *store.options, "broker:", "  url: ${BROKER_URL}", *wire.options]
    lines += [f"processes: {processes}", "relay: {lease_seconds: 12, retry: {max_attempts: 3}}", "log_level: error"]
    filed = tmp_path / "outrider.yaml"
    filed.write_text("\n".join(lines))
    secrets = {"STORE_URL": store.url, "BROKER_URL": wire.url}
    assert await _outrider("relay", "--config", str(filed), "--until-empty", "--json", **secrets) == 0
    arrived = [json.loads(body)["n"] for body in (await wire.read())[before:]]
    assert sorted(arrived) == list(range(12))
    for key in range(3):
        assert [n for n in arrived if n % 3 == key] == list(range(key, 12, 3))


@pytest.mark.postgres
@pytest.mark.pgbouncer
async def test_a_store_behind_a_pooler_can_be_installed_too(
    empty_database: str, pgbouncer_url: str, tmp_path: Path
) -> None:
    url = urlsplit(pgbouncer_url)._replace(path=urlsplit(empty_database).path).geturl()
    filed = tmp_path / "outrider.yaml"
    filed.write_text("store: {url: '${STORE_URL}', pooled: true}\n")
    for command, code in (("status", 1), ("plan", 0), ("migrate", 0), ("migrate", 0), ("status", 0)):
        assert await _outrider("db", command, "--config", str(filed), STORE_URL=url) == code


async def _outrider(*args: str, **environ: str) -> int:
    own = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider", *args, env={**own, **environ}, stdout=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(60):
        return await process.wait()


def _postgres(url: str) -> Store:
    async def stage() -> None:
        conn = await asyncpg.connect(url)
        async with conn.transaction():
            await outrider.stage(conn, *EVENTS)
        await conn.close()

    return Store(url, stage)


def _sqlite(path: Path) -> Store:
    async def stage() -> None:
        await SqliteSchema(path).migrate()
        with closing(sqlite3.connect(path, isolation_level=None)) as conn:
            conn.execute("BEGIN IMMEDIATE")
            outrider.stage_sync(conn, *EVENTS)
            conn.execute("COMMIT")

    return Store(f"sqlite:///{path}", stage)


def _kafka(bootstrap: str) -> Broker:
    async def read() -> list[bytes]:
        await asyncio.to_thread(_ensure_topic, bootstrap)
        return [message.body for message in await asyncio.to_thread(read_kafka, bootstrap, TOPIC)]

    return Broker(f"kafka://{bootstrap}", read, ("  compression.type: zstd",))


def _ensure_topic(bootstrap: str) -> None:
    known: Any = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=10)
    if TOPIC not in known.topics:
        create_topic(bootstrap, TOPIC)


def _rabbitmq(url: str) -> Broker:
    queue = f"queue-{uuid4().hex[:12]}"

    async def read() -> list[bytes]:
        connection = await aio_pika.connect(url)
        async with connection, await connection.channel() as channel:
            await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})
            return [message.body for message in await read_back(connection, queue, TOPIC)]

    return Broker(url, read, (f"  exchange: {queue}", f"  declare: ['{queue}:{TOPIC}']"))


def _embedded(path: Path) -> Broker:
    async def read() -> list[bytes]:
        broker = EmbeddedBroker(path)
        found = await broker.read("test", [TOPIC], 100)
        await broker.close()
        return [delivery.message.body for delivery in found]

    return Broker(f"embedded:///{path}", read)
