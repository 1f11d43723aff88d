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

REST_SECONDS = 60.0
"""Seconds without a new attempt, after an additional connection has failed."""

IDLE_SECONDS = 30.0
"""Seconds after which an unused additional connection is closed: another relay may be waiting for it."""

log = logging.getLogger("outrider.rabbitmq")

_under_way = attrgetter("under_way")


class PooledConnection:
    """A connection for publishing, with its channels.

    `under_way` counts messages without a result; `used_at` is the time of the last use.
    """

    def __init__(self, wire: AmqpConnection, settings: RabbitSettings, destination: Destination) -> None:
        self.wire = wire
        self._settings, self._destination = settings, destination
        self._publishers: dict[str, ConfirmChannel] = {}
        self._opening = asyncio.Lock()
        self.under_way = 0
        self.used_at = asyncio.get_running_loop().time()

    async def publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        """Send messages in one write, and wait for the confirms."""
        self.under_way += len(messages)
        try:
            return await self._publish(exchange, messages)
        finally:
            self.under_way -= len(messages)
            self.used_at = asyncio.get_running_loop().time()

    async def _publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        try:
            publisher = await self._publisher(exchange)
            self.wire.check()
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
        self.wire.ping()
        if (await asyncio.wait([wave.done], timeout=half))[0]:
            return
        if self.wire.heard_at < asked:
            self.wire.abort(f"nothing was heard from the server for {half:g} s")
        for index, message in enumerate(wave.messages):
            if wave.results[index] is None:
                destination = self._destination(message)
                error = f"no confirm from {destination} within {2 * half:g} s"
                wave.results[index] = Unknown(error, destination)

    async def _publisher(self, exchange: str) -> ConfirmChannel:
        """Return the channel of the exchange, opened if necessary; above the limit, an idle channel is closed."""
        async with self._opening:
            self.wire.check()
            found = self._publishers.pop(exchange, None)
            if found is None or not found.open:
                self._make_room()
                found = ConfirmChannel(self.wire, exchange, self._destination, self._settings.make_exchange)
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
        self._links: list[PooledConnection] = []
        self._connecting = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rest_until = float("-inf")

    def __len__(self) -> int:
        """Return the number of open connections."""
        return sum(not link.wire.lost for link in self._links)

    async def publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        """Publish through the connection with the fewest messages in flight."""
        try:
            link = await self.quietest()
        except Transient as error:
            return [Unknown(str(error))] * len(messages)
        if link.under_way >= BUSY_MESSAGES:
            self._grow()
        return await link.publish(exchange, messages)

    async def quietest(self) -> PooledConnection:
        """Return the connection with the fewest messages in flight; connect if there is none."""
        async with self._connecting:
            self._links = [link for link in self._links if not link.wire.lost]
            if not self._links:
                link = await self._connected()
                self._links.append(link)
            link = min(self._links, key=_under_way)
            link.used_at = asyncio.get_running_loop().time()
            return link

    async def wire(self) -> AmqpConnection:
        """Return a connection that the server has not blocked; RabbitMQ blocks only connections that publish."""
        link = await self.quietest()
        for blocked in (one.wire.blocked for one in self._links if not one.wire.lost):
            if blocked:
                raise Transient(blocked)
        return link.wire

    async def close(self) -> None:
        """Disconnect all."""
        async with self._connecting:
            tasks, self._tasks = self._tasks, {}
            for task in tasks.values():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks.values())
            links, self._links = self._links, []
        for link in links:
            await link.wire.close()

    async def _connected(self) -> PooledConnection:
        return PooledConnection(await connect(self._settings), self._settings, self._destination)

    def _grow(self) -> None:
        """Open another connection, unless the pool is full or an attempt failed a moment ago."""
        resting = asyncio.get_running_loop().time() < self._rest_until
        if len(self) < self._settings.connections_max and not resting:
            self._start("open", self._open)

    def _start(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work())

    async def _open(self) -> None:
        try:
            link = await self._connected()
        except OutriderError as error:
            self._rest_until = asyncio.get_running_loop().time() + REST_SECONDS
            log.info("no further connection could be had", extra={"has": len(self), "why": str(error)})
        else:
            self._links.append(link)
            self._start("give back", self._give_back)

    async def _give_back(self) -> None:
        """Close additional connections as they become idle, until a single connection is left."""
        while len(self._links) > 1:
            await asyncio.sleep(IDLE_SECONDS)
            # Closing takes a while, and the next connection may be in use by then: so the pool checks them one by one.
            while link := self._idle():
                self._links.remove(link)
                try:
                    await link.wire.close()
                finally:
                    link.wire.abort("given back")

    def _idle(self) -> PooledConnection | None:
        before = asyncio.get_running_loop().time() - IDLE_SECONDS
        return next((link for link in self._links[1:] if not link.under_way and link.used_at <= before), None)
