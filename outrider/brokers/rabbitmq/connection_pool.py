"""A pool of connections for publishing, with a channel per exchange on every connection.

A pooled connection does not reconnect: after a loss the pool discards the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from operator import attrgetter

from outrider.brokers.base import PublishResult, Unknown
from outrider.brokers.rabbitmq.confirm_channel import ConfirmBatch, ConfirmChannel, Destination
from outrider.brokers.rabbitmq.connection import AmqpConnection, connect
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import OutriderError, Transient
from outrider.event import Message

PUBLISHERS_MAX = 256

BUSY_MESSAGES = 100
"""With this number of messages in flight on every connection, the pool opens another connection."""

RETRY_SECONDS = 60.0
"""Seconds without a new attempt, after an additional connection has failed."""

IDLE_SECONDS = 30.0
"""Seconds after which an unused additional connection is closed: another relay may be waiting for it."""

log = logging.getLogger("outrider.rabbitmq")

_in_flight = attrgetter("in_flight")


class PooledConnection:
    """A connection for publishing, with its channels.

    `in_flight` counts messages without a result; `used_at` is the time of the last use.
    """

    def __init__(self, connection: AmqpConnection, settings: RabbitSettings, destination: Destination) -> None:
        self.connection = connection
        self._settings, self._destination = settings, destination
        self._publishers: dict[str, ConfirmChannel] = {}
        self._opening = asyncio.Lock()
        self.in_flight = 0
        self.used_at = asyncio.get_running_loop().time()

    async def publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        """Send messages in one write, and wait for the confirms."""
        self.in_flight += len(messages)
        try:
            return await self._publish(exchange, messages)
        finally:
            self.in_flight -= len(messages)
            self.used_at = asyncio.get_running_loop().time()

    async def _publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        try:
            publisher = await self._publisher(exchange)
            self.connection.check()
        except Transient as error:
            return [Unknown(str(error))] * len(messages)
        wave = publisher.publish(messages, self._settings.route)
        try:
            await self._wait(wave)
        finally:
            # A caller that gave up must not leave its messages behind: a late confirm is then ignored.
            if wave.left:
                publisher.forget(wave)
        return wave.results

    async def _wait(self, wave: ConfirmBatch) -> None:
        """Wait for the wave. After a timeout, a silent server is down; if the server still answers, a queue is down."""
        half = self._settings.confirm_seconds / 2
        if (await asyncio.wait([wave.done], timeout=half))[0]:
            return
        asked = asyncio.get_running_loop().time()
        self.connection.ping()
        if (await asyncio.wait([wave.done], timeout=half))[0]:
            return
        if self.connection.received_at < asked:
            self.connection.abort(f"no answer from the server for {half:g} s")
        for index, message in enumerate(wave.messages):
            if wave.results[index] is None:
                destination = self._destination(message)
                error = f"no confirm from {destination} within {2 * half:g} s"
                wave.results[index] = Unknown(error, destination)

    async def _publisher(self, exchange: str) -> ConfirmChannel:
        """Return the channel of the exchange, opened if necessary; above the limit, an idle channel is closed."""
        async with self._opening:
            self.connection.check()
            found = self._publishers.pop(exchange, None)
            if found is None or not found.open:
                self._make_room()
                found = ConfirmChannel(self.connection, exchange, self._destination, self._settings.make_exchange)
                await found.start()
            # Moved to the end: the order of the table is the order of use.
            self._publishers[exchange] = found
            return found

    def _make_room(self) -> None:
        if len(self._publishers) < PUBLISHERS_MAX:
            return
        for exchange, publisher in self._publishers.items():
            if publisher.idle:
                del self._publishers[exchange]
                publisher.close()
                return


class ConnectionPool:
    """Spreads waves over connections. A stream never has events in two waves at once, so order is safe."""

    def __init__(self, settings: RabbitSettings, destination: Destination) -> None:
        self._settings, self._destination = settings, destination
        self._connections: list[PooledConnection] = []
        self._connecting = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retry_at = float("-inf")

    def __len__(self) -> int:
        """Return the number of open connections."""
        return sum(not pooled.connection.lost for pooled in self._connections)

    async def publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        """Publish through the connection with the fewest messages in flight."""
        try:
            pooled = await self.least_busy()
        except Transient as error:
            return [Unknown(str(error))] * len(messages)
        if pooled.in_flight >= BUSY_MESSAGES:
            self._grow()
        return await pooled.publish(exchange, messages)

    async def least_busy(self) -> PooledConnection:
        """Return the connection with the fewest messages in flight; connect if there is none."""
        async with self._connecting:
            self._connections = [pooled for pooled in self._connections if not pooled.connection.lost]
            if not self._connections:
                pooled = await self._connect()
                self._connections.append(pooled)
            pooled = min(self._connections, key=_in_flight)
            pooled.used_at = asyncio.get_running_loop().time()
            return pooled

    async def connection(self) -> AmqpConnection:
        """Return a connection that the server has not blocked; RabbitMQ blocks only connections that publish."""
        pooled = await self.least_busy()
        for blocked in (one.connection.blocked for one in self._connections if not one.connection.lost):
            if blocked:
                raise Transient(blocked)
        return pooled.connection

    async def close(self) -> None:
        """Disconnect all."""
        async with self._connecting:
            tasks, self._tasks = self._tasks, {}
            for task in tasks.values():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks.values())
            connections, self._connections = self._connections, []
        for pooled in connections:
            await pooled.connection.close()

    async def _connect(self) -> PooledConnection:
        return PooledConnection(await connect(self._settings), self._settings, self._destination)

    def _grow(self) -> None:
        """Open another connection, unless the pool is full or an attempt failed a moment ago."""
        waiting = asyncio.get_running_loop().time() < self._retry_at
        if len(self) < self._settings.connections_max and not waiting:
            self._start("open", self._open)

    def _start(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work())

    async def _open(self) -> None:
        try:
            pooled = await self._connect()
        except OutriderError as error:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS
            log.info("another connection could not be opened", extra={"has": len(self), "error": str(error)})
        else:
            self._connections.append(pooled)
            self._start("close idle", self._close_idle)

    async def _close_idle(self) -> None:
        """Close additional connections as they become idle, until a single connection is left."""
        while len(self._connections) > 1:
            await asyncio.sleep(IDLE_SECONDS)
            # Closing takes a while, and the next connection may be in use by then: so the pool checks them one by one.
            while pooled := self._find_idle():
                self._connections.remove(pooled)
                try:
                    await pooled.connection.close()
                finally:
                    pooled.connection.abort("given back")

    def _find_idle(self) -> PooledConnection | None:
        before = asyncio.get_running_loop().time() - IDLE_SECONDS
        return next(
            (pooled for pooled in self._connections[1:] if not pooled.in_flight and pooled.used_at <= before), None
        )
