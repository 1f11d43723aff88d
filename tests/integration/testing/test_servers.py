"""The throw-away servers themselves: each kind serves, survives a crash, freezes and thaws, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import asyncpg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pymongo import AsyncMongoClient
from pymongo.errors import OperationFailure

from outrider.testing.servers import (
    KafkaServer,
    MongoServer,
    PgBouncer,
    PostgresServer,
    RabbitServer,
    Server,
    ServerError,
    kafka_bootstrap,
    mongo_url,
    pgbouncer_url,
    postgres_url,
    rabbitmq_url,
)
from outrider.testing.servers.__main__ import NO_FSYNC
from outrider.testing.servers.kafka import create_topic
from outrider.testing.servers.mongo import find_program as find_mongo
from outrider.testing.servers.postgres import find_program as find_pgbouncer
from outrider.testing.servers.postgres import find_programs as find_postgres
from outrider.testing.servers.server import children_of

SILENCE_SECONDS = 1.0
PATIENCE_SECONDS = 30.0
NOTE = "kept"


async def _postgres_write(url: str) -> None:
    await _sql(url, f"CREATE TABLE notes AS SELECT '{NOTE}' AS note")


async def _postgres_read(url: str) -> str:
    return str(await _sql(url, "SELECT note FROM notes"))


async def _sql(url: str, statement: str) -> object:
    conn = await asyncpg.connect(url, statement_cache_size=0)
    try:
        return await conn.fetchval(statement)
    finally:
        conn.terminate()


async def _mongo_write(url: str) -> None:
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        await client.test.notes.insert_one({"note": NOTE})


async def _mongo_read(url: str) -> str:
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        found = await client.test.notes.find_one()
        assert found is not None
        return str(found["note"])


async def _rabbitmq_write(url: str) -> None:
    async with await aio_pika.connect(url) as connection, await connection.channel() as channel:
        await channel.declare_queue("notes", durable=True)
        note = aio_pika.Message(NOTE.encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(note, "notes")


async def _rabbitmq_read(url: str) -> str:
    async with await aio_pika.connect(url) as connection, await connection.channel() as channel:
        queue = await channel.get_queue("notes")
        return (await queue.get()).body.decode()


async def _kafka_write(url: str) -> None:
    servers = url.removeprefix("kafka://")
    await asyncio.to_thread(create_topic, servers, "notes")
    producer: Any = Producer({"bootstrap.servers": servers, "log_level": 0})
    producer.produce("notes", NOTE.encode())
    assert await asyncio.to_thread(producer.flush, PATIENCE_SECONDS) == 0


async def _kafka_read(url: str) -> str:
    options = {"bootstrap.servers": url.removeprefix("kafka://"), "group.id": "readers", "log_level": 0}
    consumer: Any = Consumer(options)
    consumer.assign([TopicPartition("notes", 0, 0)])
    try:
        while (found := await asyncio.to_thread(consumer.poll, 0.1)) is None or found.error():
            pass
        return str(found.value().decode())
    finally:
        consumer.close()


@contextmanager
def _pooler() -> Iterator[Server]:
    with PostgresServer() as postgres, PgBouncer(postgres) as pooler:
        yield pooler


@dataclass(frozen=True, slots=True)
class Kind:
    """A server, and how a client of it writes a note and reads it back."""

    start: Callable[[], AbstractContextManager[Server]]
    write: Callable[[str], Awaitable[None]]
    read: Callable[[str], Awaitable[str]]
    written: Callable[[Any], object] | None = None
    """Makes the server write down what it has only in mind."""


KINDS = [
    pytest.param(Kind(PostgresServer, _postgres_write, _postgres_read), id="postgres", marks=pytest.mark.postgres),
    pytest.param(Kind(_pooler, _postgres_write, _postgres_read), id="pgbouncer", marks=pytest.mark.pgbouncer),
    pytest.param(Kind(MongoServer, _mongo_write, _mongo_read), id="mongo", marks=pytest.mark.mongo),
    pytest.param(
        Kind(RabbitServer, _rabbitmq_write, _rabbitmq_read, lambda server: server.ctl("eval", "mnesia:sync_log().")),
        id="rabbitmq",
        marks=pytest.mark.rabbitmq,
    ),
    pytest.param(Kind(KafkaServer, _kafka_write, _kafka_read), id="kafka", marks=pytest.mark.kafka),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_survives_a_crash_freezes_and_thaws_and_leaves_nothing(kind: Kind) -> None:
    with kind.start() as server:
        await kind.write(server.url)
        if kind.written:
            await asyncio.to_thread(kind.written, server)
        server.kill()
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await kind.read(server.url) == NOTE
        server.pause()
        with pytest.raises(TimeoutError):
            await _read_within(SILENCE_SECONDS, kind, server)
        server.resume()
        assert await _read_within(PATIENCE_SECONDS, kind, server) == NOTE
        home = server.home
        await asyncio.to_thread(server.stop)
        assert not home.exists()


@pytest.mark.postgres
async def test_nothing_of_a_killed_server_is_left_when_the_kill_returns() -> None:
    with PostgresServer() as server:
        for _ in range(5):
            clients = [await asyncpg.connect(server.url) for _ in range(20)]
            crowd = [server.pid, *children_of(server.pid)]
            assert len(crowd) > 20
            server.kill()
            assert [pid for pid in crowd if _lives(pid)] == []
            for client in clients:
                client.terminate()
            await asyncio.to_thread(server.start)


def _lives(pid: int) -> bool:
    """Tell whether a process runs; one that only waits for its parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _read_within(seconds: float, kind: Kind, server: Server) -> str:
    async with asyncio.timeout(seconds):
        return await kind.read(server.url)


@pytest.mark.mongo
async def test_a_mongodb_can_be_outside_of_any_set_and_can_be_made_to_fail() -> None:
    with MongoServer(standalone=True) as server:
        async with AsyncMongoClient[dict[str, Any]](server.url) as client:
            assert "setName" not in await client.admin.command("hello")
            fault = {"failCommands": ["insert"], "errorCode": 2}
            await client.admin.command("configureFailPoint", "failCommand", mode={"times": 2}, data=fault)
            with pytest.raises(OperationFailure, match="failCommand"):
                await client.test.notes.insert_one({"note": NOTE})


@pytest.mark.mongo
async def test_a_mongodb_takes_transactions(mongo_url: str) -> None:
    name = f"test_{uuid4().hex[:12]}"
    async with AsyncMongoClient[dict[str, Any]](mongo_url) as client, client.start_session() as session:
        async with await session.start_transaction():
            await client[name].notes.insert_one({"note": NOTE}, session=session)
            assert await client[name].notes.find_one() is None
        assert await client[name].notes.count_documents({"note": NOTE}) == 1
        await client.drop_database(name)


@pytest.mark.pgbouncer
async def test_a_pooler_moves_a_client_from_session_to_session(pgbouncer_url: str) -> None:
    one, other = [await asyncpg.connect(pgbouncer_url, statement_cache_size=0) for _ in range(2)]
    # Two transactions at once need two sessions; after that both are free to be taken by turns.
    async with one.transaction(), other.transaction():
        sessions = {await conn.fetchval("SELECT pg_backend_pid()") for conn in (one, other)}
    assert {await one.fetchval("SELECT pg_backend_pid()") for _ in range(4)} == sessions
    await one.close()
    await other.close()


@pytest.mark.parametrize(
    ("variable", "given", "found", "wanted"),
    [
        ("OUTRIDER_TEST_POSTGRES", "postgresql://db/shop", postgres_url, "postgresql://db/shop"),
        ("OUTRIDER_TEST_PGBOUNCER", "postgresql://pool/shop", lambda: pgbouncer_url(""), "postgresql://pool/shop"),
        ("OUTRIDER_TEST_RABBITMQ", "amqp://mq/", rabbitmq_url, "amqp://mq/"),
        ("OUTRIDER_TEST_MONGO", "mongodb://db/?replicaSet=a", mongo_url, "mongodb://db/?replicaSet=a"),
        ("OUTRIDER_TEST_KAFKA", "one:9092,two:9092", kafka_bootstrap, "one:9092,two:9092"),
        ("OUTRIDER_TEST_KAFKA", "kafka://one:9092/", kafka_bootstrap, "one:9092"),
    ],
)
def test_a_server_named_in_the_environment_is_used_instead(
    variable: str,
    given: str,
    found: Callable[[], AbstractContextManager[str]],
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, given)
    with found() as url:
        assert url == wanted


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs are kept."""
    monkeypatch.setenv("OUTRIDER_TEST_LOGS", str(tmp_path / "logs"))
    return tmp_path / "logs"


@pytest.mark.pgbouncer
def test_the_log_of_a_server_that_does_not_start_is_kept_and_the_error_says_where(logs: Path) -> None:
    server = PgBouncer("postgresql://127.0.0.1:1/postgres", settings={"pool_mode": "puddle"})
    with pytest.raises(ServerError, match="did not start") as rejected:
        server.start()
    [kept] = logs.iterdir()
    assert "puddle" in kept.read_text()
    assert rejected.value.__notes__ == [f"The whole log of PgBouncer is in {kept}."]


@pytest.mark.pgbouncer
def test_the_log_of_a_server_is_kept_only_if_its_user_failed(logs: Path) -> None:
    server = PgBouncer("postgresql://127.0.0.1:1/postgres")
    with server:
        pass
    assert not logs.exists()
    with pytest.raises(ZeroDivisionError), server:
        raise ZeroDivisionError
    [kept] = logs.iterdir()
    assert "process up" in kept.read_text()


@pytest.mark.pgbouncer
@pytest.mark.mongo
async def test_servers_run_from_the_command_line_until_they_are_stopped() -> None:
    for programs in (find_pgbouncer, find_mongo, find_postgres):
        programs()  # Here, and not in the other process, their absence skips the test.
    command = [sys.executable, "-m", "outrider.testing.servers", "pgbouncer", "mongo", "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    urls = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE_SECONDS))
    assert list(urls) == ["postgres", "pgbouncer", "mongo"]
    await _postgres_write(urls["postgres"])
    assert await _postgres_read(urls["pgbouncer"]) == NOTE
    await _mongo_write(urls["mongo"])
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0
    progress = (await process.stderr.read()).decode().splitlines()
    assert progress == ["Starting PostgreSQL ...", NO_FSYNC, "Starting PgBouncer ...", "Starting MongoDB ..."]
