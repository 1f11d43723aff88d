"""A travel agency on Kafka and on RabbitMQ, whose processes are killed at random: every trip is whole, or undone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import asyncpg
import pytest

from outrider import app
from outrider.testing.servers.kafka import create_topic, delete_topics
from tests.support import travel
from tests.support.relay_process import until
from tests.support.saga_ledger import TABLES
from tests.support.saga_worker_process import FORKING, all_ended, end
from tests.support.sizes import sized
from tests.support.travel import BOLD, FINE, FULL_FLIGHT, UNPAID, Place, agency_sagas, airline_inbox

pytestmark = [pytest.mark.postgres, pytest.mark.chaos, pytest.mark.timeout(sized(1_800, 600))]

TRIPS = sized(1_000, 32, quick=8)
KILLS = sized(60, 6, quick=2)
PARTITIONS = 4
UNDER_WAY_MAX, BOOKED_AT_ONCE = 32, 8
"""Trips that are under way at a time. With many more, answers take longer than a step waits for them, and each command
that is sent again makes them later still."""
PROGRESS = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outrider.saga_audit_log', 'id')::regclass), 0) >= $1
"""
DROPPED = "SELECT count(*) FROM outrider.saga_audit_log WHERE what = 'reply dropped'"
UNDER_WAY = "SELECT count(*) <= $1 FROM outrider.saga_instance WHERE ended_at IS NULL"
NOTES_PER_TRIP = 20
"""Fewer than any trip writes to the audit log."""


@pytest.fixture
def name() -> str:
    """A name for topics, queues and consumers, since the brokers are shared."""
    return f"travel-{uuid4().hex[:8]}"


@pytest.fixture
def kafka_place(kafka: str, postgres_url: str, name: str) -> Iterator[Place]:
    """Topics on Kafka, whose groups notice soon that a member was killed."""
    place = Place(postgres_url, f"kafka://{kafka}?session.timeout.ms=1000", name)
    for topic in (place.commands, place.replies):
        create_topic(kafka, topic, partitions=PARTITIONS)
    yield place
    delete_topics(kafka, name)


@pytest.fixture
async def rabbit_place(rabbitmq_url: str, postgres_url: str, name: str) -> AsyncIterator[Place]:
    """Queues on RabbitMQ that their consumers have made before anything is published."""
    place = Place(postgres_url, f"{rabbitmq_url}?exchange={name}&declare=", name)
    queues = []
    for inbox in (app.saga_inbox(agency_sagas(place, _nobody)), airline_inbox(place)):
        [routes] = inbox.consumers.values()
        source = app.open_source(place.broker, routes)
        await source.start(_none)
        await source.close()
        queues.append(routes.consumer)
    yield place
    async with await aio_pika.connect(rabbitmq_url) as connection, await connection.channel() as channel:
        for queue in queues:
            await channel.queue_delete(queue)
        await channel.exchange_delete(name)


async def _nobody() -> Any:
    raise AssertionError("the test runs no sagas itself")


async def _none(partitions: frozenset[str]) -> None:
    """Nothing is under way."""


class Processes:
    """Two agencies and two airlines, each with a place in the list that a new process takes after a kill."""

    def __init__(self, place: Place, log: Path) -> None:
        self._task = log, place
        self._mains: list[Callable[..., None]] = [travel.run_agency, travel.run_airline] * 2
        self._running: list[BaseProcess] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the processes around the block; whatever is left of them at the end is killed."""
        FORKING.set_forkserver_preload([travel.__name__])
        self._running = [self._start(main) for main in self._mains]
        try:
            yield
        except BaseException:
            print(self._task[0].read_text()[-20_000:])
            raise
        finally:
            for process in self._running:
                process.kill()
                await end(process)

    async def kill(self, number: int) -> None:
        """Kill a process and start another one in its place."""
        self._running[number].kill()
        await end(self._running[number])
        self._running[number] = self._start(self._mains[number])

    async def stop(self) -> list[int | None]:
        """Ask all processes for a clean stop; return how they ended."""
        for process in self._running:
            process.terminate()
        return [await end(process) for process in self._running]

    def _start(self, main: Callable[..., None]) -> BaseProcess:
        process = FORKING.Process(target=main, args=self._task, daemon=True)
        process.start()
        return process


async def _every_trip_is_whole_or_undone(conn: Any, place: Place, log: Path) -> None:
    rng = random.Random(7)
    await conn.execute(TABLES)
    trip_ids = [f"{fate}-{number:04}" for number in range(TRIPS // 4) for fate in (FINE, BOLD, UNPAID, FULL_FLIGHT)]
    processes = Processes(place, log)
    async with processes.running(), asyncio.TaskGroup() as tasks:
        booking = tasks.create_task(_book(place, trip_ids))
        for kill in range(1, KILLS + 1):
            notes = len(trip_ids) * NOTES_PER_TRIP * kill // (KILLS + 1)
            await until(f"{notes} notes", conn, PROGRESS, notes)
            await processes.kill(rng.randrange(4))
        await booking
        await all_ended(conn, len(trip_ids), seconds_max=400)
        assert await processes.stop() == [0] * 4
    await travel.check_trips(conn, trip_ids)
    assert await conn.fetchval(DROPPED), "no reply came twice, or too late"


async def _book(place: Place, trip_ids: Sequence[str]) -> None:
    """Book trips as fast as others end."""
    conn = await asyncpg.connect(place.store)
    for first in range(0, len(trip_ids), BOOKED_AT_ONCE):
        await until("trips to end", conn, UNDER_WAY, UNDER_WAY_MAX - BOOKED_AT_ONCE)
        await travel.book_trips(conn, place, trip_ids[first : first + BOOKED_AT_ONCE])
    await conn.close()


@pytest.mark.kafka
async def test_every_trip_is_whole_or_undone_on_kafka_whoever_is_killed(
    conn: Any, kafka_place: Place, tmp_path: Path
) -> None:
    await _every_trip_is_whole_or_undone(conn, kafka_place, tmp_path / "travel.log")


@pytest.mark.rabbitmq
async def test_every_trip_is_whole_or_undone_on_rabbitmq_whoever_is_killed(
    conn: Any, rabbit_place: Place, tmp_path: Path
) -> None:
    await _every_trip_is_whole_or_undone(conn, rabbit_place, tmp_path / "travel.log")
