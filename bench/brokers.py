"""PostgreSQL to a broker, beside the client of that broker publishing the same messages from memory.

Every round measures all contenders one after another, so that all see the same machine; the median round counts. The
relay is the command that people run. What starting takes is not measured, for anybody.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Self

import aio_pika

from bench import backlog, clients, cores
from bench.processes import Watch, relays
from outrider.brokers.base import Broker
from outrider.brokers.kafka import KafkaBroker
from outrider.brokers.rabbitmq import RabbitBroker
from outrider.event import Message
from outrider.testing.servers import KafkaServer, PostgresServer, RabbitServer, Server

PARTITIONS = 6
EXCHANGE, QUEUE = "outrider", "bench"
WARM_EVENTS = 20_000
FEW_KEYS = 500
RELAY = "relay, 1 process"
DRAIN_SECONDS_MAX = 120


@dataclass(frozen=True, slots=True)
class Arena:
    """A broker, the client that people would use without us, and how much faster or slower we may be."""

    name: str
    rival: str
    target: float
    server: Server
    relay_url: str
    adapter: Callable[[], Broker]
    client: Callable[[Sequence[Message]], AbstractAsyncContextManager[clients.Publish]]
    reset: Callable[[], Awaitable[None]]
    client_share: int = 1
    """The rival publishes one part in so many of the backlog, if the whole would take too long."""
    few_keys: bool = False
    apart: bool = False
    """Also measure with a core for the client alone, where the client is the limit."""
    least: tuple[str, ...] = ()
    """The module and the arguments of the least that could be called a relay."""


@dataclass(frozen=True, slots=True)
class Score:
    """One measurement: events, seconds, and the processor seconds of each who took part."""

    what: str
    events: int
    seconds: float
    cpu_seconds: dict[str, float]
    apart: bool = False

    @classmethod
    def of(cls, what: str, events: int, watch: Watch) -> Self:
        """Make a score of what was watched."""
        return cls(what, events, watch.seconds, watch.cpu_seconds)

    def times(self, scores: Sequence[Score]) -> float:
        """Return the rate over that of the rival, which is the first of those measured under the same conditions."""
        rival = next(score for score in scores if score.apart == self.apart)
        return self.events_per_second / rival.events_per_second

    @property
    def events_per_second(self) -> float:
        """Return the rate."""
        return self.events / self.seconds

    @property
    def cpu_microseconds(self) -> dict[str, float]:
        """Return what an event cost everybody, and all together."""
        spent = {**self.cpu_seconds, "all": sum(self.cpu_seconds.values())}
        return {client: seconds / self.events * 1e6 for client, seconds in spent.items()}


def kafka(server: KafkaServer) -> Arena:
    """Kafka, against librdkafka itself."""
    server.create_topic(backlog.TOPIC, partitions=PARTITIONS)

    async def reset() -> None:
        """A log does not mind what is in it already."""

    return Arena(
        name="Kafka",
        rival="librdkafka",
        target=0.5,
        server=server,
        relay_url=server.url,
        adapter=lambda: KafkaBroker(server.bootstrap),
        client=lambda messages: clients.librdkafka(server.bootstrap, messages),
        reset=reset,
        apart=True,
        least=("bench.least", server.bootstrap),
    )


def rabbitmq(server: RabbitServer) -> Arena:
    """RabbitMQ, a quorum queue behind a topic exchange, against aio-pika."""
    url = f"{server.url}?declare={QUEUE}"

    async def reset() -> None:
        connection = await aio_pika.connect(server.url)
        await (await connection.channel()).queue_delete(QUEUE)
        await connection.close()
        declaring = RabbitBroker(url)
        await declaring.start()
        await declaring.close()

    return Arena(
        name="RabbitMQ",
        rival="aio-pika",
        target=3.0,
        server=server,
        relay_url=url,
        adapter=lambda: RabbitBroker(url),
        client=lambda messages: clients.pika(server.url, EXCHANGE, messages),
        reset=reset,
        client_share=4,
        few_keys=True,
    )


async def run(arena: Arena, postgres: PostgresServer, *, events: int, keys: int, rounds: int) -> list[Score]:
    """Measure every contender in every round; return each one's median."""
    await backlog.prepare(postgres.url, events)
    await backlog.fill(postgres.url, events, keys)
    messages = await backlog.messages(postgres.url, events)
    field = Field(arena, postgres, messages, keys)
    await field.warm_up()
    played = [await field.round() for _ in range(rounds)]
    return [_median(column) for column in zip(*played, strict=True)]


def _median(scores: Sequence[Score]) -> Score:
    middle = median_low(score.events_per_second for score in scores)
    return next(score for score in scores if score.events_per_second == middle)


@dataclass(frozen=True, slots=True)
class Field:
    """Where the rounds are played."""

    arena: Arena
    postgres: PostgresServer
    messages: list[Message]
    keys: int

    async def warm_up(self) -> None:
        """Let the broker find its feet: a Java machine compiles what it runs often."""
        await self.arena.reset()
        async with clients.adapter(self.arena.adapter(), self.messages[:WARM_EVENTS]) as publish:
            await publish()

    async def round(self) -> list[Score]:
        """Measure each contender once."""
        arena = self.arena
        some = self.messages[: len(self.messages) // arena.client_share]
        scores = [
            await self._from_memory(f"{arena.rival}, from memory", arena.client(some), len(some)),
            await self._from_memory(
                "our adapter, from memory", clients.adapter(arena.adapter(), self.messages), len(self.messages)
            ),
            await self._relayed(RELAY),
            await self._relayed("relay, 2 processes", processes=2),
            await self._relayed("relay, 1 process, --no-archive", archive=False),
        ]
        if arena.few_keys:
            scores.append(await self._relayed(f"relay, 1 process, {FEW_KEYS} keys", keys=FEW_KEYS))
        if arena.least:
            scores.append(await self._least("fetch, produce, delete, and nothing else"))
        return scores + (await self._apart() if arena.apart else [])

    async def _apart(self) -> list[Score]:
        """Measure once more, with one core for the client and the other for the servers."""
        arena, suffix = self.arena, ", own core"
        with cores.apart([self.postgres.pid, arena.server.pid]):
            scores = [
                await self._from_memory(f"{arena.rival}{suffix}", arena.client(self.messages), len(self.messages)),
                await self._relayed(RELAY + suffix),
                await self._relayed(f"relay, 1 process, --no-archive{suffix}", archive=False),
            ]
        return [replace(score, apart=True) for score in scores]

    async def _from_memory(self, what: str, client: AbstractAsyncContextManager[clients.Publish], events: int) -> Score:
        await self.arena.reset()
        async with client as publish:
            # The messages are there to stay; looking for garbage among them would be charged to whoever is measured.
            gc.collect()
            gc.freeze()
            with Watch({"client": os.getpid(), "broker": self.arena.server.pid}) as watch:
                await publish()
            gc.unfreeze()
        return Score.of(what, events, watch)

    async def _least(self, what: str) -> Score:
        await self.arena.reset()
        await backlog.fill(self.postgres.url, len(self.messages), self.keys)
        module, *rest = self.arena.least
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, self.postgres.url, *rest, stdin=PIPE, stdout=PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(DRAIN_SECONDS_MAX):
            assert await process.stdout.readline() == b"ready\n"
            pids = {"client": process.pid, "database": self.postgres.pid, "broker": self.arena.server.pid}
            with Watch(pids) as watch:
                process.stdin.write(b"\n")
                assert await process.stdout.readline() == b"done\n"
            await process.wait()
        return Score.of(what, len(self.messages), watch)

    async def _relayed(self, what: str, *, processes: int = 1, archive: bool = True, keys: int | None = None) -> Score:
        await self.arena.reset()
        await backlog.fill(self.postgres.url, len(self.messages), keys or self.keys)
        starting = relays(self.postgres.url, self.arena.relay_url, processes=processes, archive=archive)
        async with starting as running, asyncio.timeout(DRAIN_SECONDS_MAX):
            left = len(self.messages) - await running.settled()
            pids = {"client": running.pid, "database": self.postgres.pid, "broker": self.arena.server.pid}
            with Watch(pids) as watch:
                await running.settled(left)
        return Score.of(what, left, watch)
