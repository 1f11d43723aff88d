"""A pool of connections for publishing, with a channel per destination on every connection.

A queue that does not answer blocks its channel at the server: no message behind reaches another queue. Destinations
therefore have channels of their own, up to a number; the others share some.

A pooled connection does not reconnect: after a loss the pool discards the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from operator import attrgetter
from typing import NamedTuple

from outrider.brokers.base import PublishResult, Unknown
from outrider.brokers.patience import Patience
from outrider.brokers.rabbitmq.confirm_channel import ChannelProgress, ConfirmBatch, ConfirmChannel, Destination
from outrider.brokers.rabbitmq.connection import AmqpConnection, connect
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import OutriderError, Transient
from outrider.event import Message
from outrider.redaction import without_values

PUBLISHERS_MAX = 256

BUSY_MESSAGES = 100
"""With this number of messages in flight on every connection, the pool opens another connection."""

RETRY_SECONDS = 60.0
"""Seconds without a new attempt, after an additional connection has failed."""

IDLE_SECONDS = 30.0
"""Seconds after which an unused additional connection is closed: another relay may be waiting for it."""

ANSWER_SHARE = 1 / 4
"""The share of the time limit in which a server that is asked must answer, and another connection must open."""

ChannelName = tuple[str, str]
"""An exchange, and a routing key or the number of a channel that many routing keys share."""

IsReachable = Callable[[], Awaitable[bool]]
"""Returns whether the server accepts another connection."""

log = logging.getLogger("outrider.rabbitmq")

_in_flight = attrgetter("in_flight")


class SharedState(NamedTuple):
    """The knowledge of all connections of a pool: the usual time of an answer, and the last answers by channel."""

    patience: Patience
    progress: dict[ChannelName, ChannelProgress]


class PooledConnection:
    """A connection for publishing, with its channels.

    `in_flight` counts messages without a result; `used_at` is the time of the last use.
    """

    def __init__(
        self,
        connection: AmqpConnection,
        settings: RabbitSettings,
        destination: Destination,
        shared: SharedState,
        is_reachable: IsReachable,
    ) -> None:
        self.connection = connection
        self._settings, self._destination = settings, destination
        self._patience, self._progress, self._is_reachable = shared.patience, shared.progress, is_reachable
        self._publishers: dict[ChannelName, ConfirmChannel] = {}
        self._opening, self._ending = asyncio.Lock(), asyncio.Lock()
        self._finishing: set[asyncio.Task[None]] = set()
        self.in_flight = 0
        self.used_at = asyncio.get_running_loop().time()

    async def publish(self, name: ChannelName, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        """Send messages in one write, and wait for the confirms.

        A destination that does not answer in time is left behind: the rest of the wave is `Unanswered`.
        """
        self.in_flight += len(messages)
        is_left = False
        try:
            publisher = await self._publisher(name)
            self.connection.check()
            deadline = asyncio.get_running_loop().time() + self._settings.confirm_seconds
            wave = publisher.publish(messages, self._settings.route)
            try:
                if await self._is_answered(publisher, wave, deadline):
                    return wave.results
                # The server stops reading a channel that has sent to a queue without answers.
                if self._publishers.get(name) is publisher:
                    del self._publishers[name]
                results = wave.leave(self._destination)
                task = asyncio.create_task(self._finish(publisher, wave, deadline))
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)
                is_left = True
                return results
            finally:
                # A caller that gave up must not leave its messages behind: a late confirm is then ignored.
                if wave.left and not is_left:
                    publisher.forget(wave)
        except Transient as error:
            return [Unknown(str(error))] * len(messages)
        finally:
            self._used(0 if is_left else len(messages))

    async def publish_apart(self, name: ChannelName, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        """Send messages on a channel of their own, and wait for the confirms up to the time limit."""
        self.in_flight += len(messages)
        publisher = self._new_publisher(name)
        try:
            await publisher.start()
            self.connection.check()
            wave = publisher.publish(messages, self._settings.route)
            await asyncio.wait([wave.done], timeout=self._settings.confirm_seconds)
            wave.give_up(self._no_confirm)
            return wave.results
        except Transient as error:
            return [Unknown(str(error))] * len(messages)
        finally:
            if publisher.open:
                publisher.close()
            self._used(len(messages))

    async def close(self) -> None:
        """Close the connection, and give up the messages without an answer."""
        for task in self._finishing:
            task.cancel()
        if self._finishing:
            await asyncio.wait(self._finishing)
        await self.connection.close()

    async def _is_answered(self, publisher: ConfirmChannel, wave: ConfirmBatch, deadline: float) -> bool:
        """Wait for a wave; return False if the server answers, and the rest of the wave has no answer.

        Messages wait behind those of earlier waves. A wave without any confirm is therefore patient as long as the
        others of its channel get theirs.
        """
        clock = asyncio.get_running_loop().time
        began = progress_at = clock()
        count = left = wave.left
        while True:
            await asyncio.wait(
                [wave.done], timeout=max(0.0, min(progress_at + self._patience.seconds, deadline) - clock())
            )
            if not wave.left:
                self._patience.learn(clock() - progress_at)
                return True
            if wave.left < left:
                left, progress_at = wave.left, clock()
            elif left == count and publisher.progress.at > progress_at:
                progress_at = publisher.progress.at
            elif clock() >= deadline or (await self._is_reading() and wave.left == left):
                return False
            elif clock() - max(began, self.connection.received_at) >= self._silent_seconds:
                await self._end_silent()

    @property
    def _silent_seconds(self) -> float:
        return self._settings.confirm_seconds / 2

    async def _is_reading(self) -> bool:
        try:
            return await self.connection.is_answering(self._settings.confirm_seconds * ANSWER_SHARE)
        except Transient:
            return False

    async def _end_silent(self) -> None:
        """End a connection that the server does not read.

        If the server answers on another connection, a queue that does not confirm has blocked this one.
        """
        async with self._ending:
            if not self.connection.lost:
                self.connection.is_stuck = await self._is_reachable()
                self.connection.abort(f"no answer from the server for {self._silent_seconds:g} s")

    async def _finish(self, publisher: ConfirmChannel, wave: ConfirmBatch, deadline: float) -> None:
        """Wait for the rest of a wave that was left behind, and close the channel after its last wave."""
        began = asyncio.get_running_loop().time()
        try:
            if not self._is_mixed(wave):
                await asyncio.wait([wave.done], timeout=max(0.0, deadline - began))
            if not wave.left:
                self._patience.learn(asyncio.get_running_loop().time() - began + self._patience.seconds)
        finally:
            wave.give_up(self._no_confirm)
            publisher.forget(wave)
            if publisher.open and publisher.idle:
                publisher.close()
            self._used(len(wave.messages))

    def _is_mixed(self, wave: ConfirmBatch) -> bool:
        """Return whether the wave may hold messages of good destinations that the server does not read any more."""
        pairs = zip(wave.messages, wave.results, strict=True)
        return len({self._destination(message) for message, result in pairs if result is None}) > 1

    def _no_confirm(self, message: Message) -> PublishResult:
        destination = self._destination(message)
        return Unknown(f"no confirm from {destination} within {self._settings.confirm_seconds:g} s", destination)

    def _used(self, answered: int) -> None:
        self.in_flight -= answered
        self.used_at = asyncio.get_running_loop().time()

    def _new_publisher(self, name: ChannelName) -> ConfirmChannel:
        progress = self._progress.setdefault(name, ChannelProgress())
        return ConfirmChannel(self.connection, self._destination, self._settings.make_exchange, progress)

    async def _publisher(self, name: ChannelName) -> ConfirmChannel:
        """Return the channel of the name, opened if necessary; above the limit, an idle channel is closed."""
        async with self._opening:
            self.connection.check()
            found = self._publishers.pop(name, None)
            if found is None or not found.open:
                self._make_room()
                found = self._new_publisher(name)
                await found.start()
            # Moved to the end: the order of the table is the order of use.
            self._publishers[name] = found
            return found

    def _make_room(self) -> None:
        if len(self._publishers) < PUBLISHERS_MAX:
            return
        for name, publisher in self._publishers.items():
            if publisher.idle:
                del self._publishers[name]
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
        self._shared = SharedState(Patience(settings.confirm_seconds / 2), {})

    def __len__(self) -> int:
        """Return the number of open connections."""
        return sum(not pooled.connection.lost for pooled in self._connections)

    async def publish(self, name: ChannelName, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        """Publish through the connection with the fewest messages in flight."""
        try:
            pooled = await self.least_busy()
        except Transient as error:
            return [Unknown(str(error))] * len(messages)
        if pooled.in_flight >= BUSY_MESSAGES:
            self._grow()
        return await pooled.publish(name, messages)

    async def publish_apart(self, name: ChannelName, messages: Sequence[Message]) -> Sequence[PublishResult | None]:
        """Publish on a channel of its own; neither an error nor a missing confirm affects another publish."""
        try:
            pooled = await self.least_busy()
        except Transient as error:
            return [Unknown(str(error))] * len(messages)
        return await pooled.publish_apart(name, messages)

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
            await pooled.close()

    async def _connect(self) -> PooledConnection:
        connection = await connect(self._settings)
        return PooledConnection(connection, self._settings, self._destination, self._shared, self._is_reachable)

    async def _is_reachable(self) -> bool:
        """Return whether the server accepts another connection, which then takes the place of a silent one."""
        try:
            async with asyncio.timeout(self._settings.confirm_seconds * ANSWER_SHARE):
                pooled = await self._connect()
        except (OutriderError, TimeoutError):
            return False
        self._connections.append(pooled)
        return True

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
            log.info("another connection could not be opened", extra={"has": len(self), "error": without_values(error)})
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
                    await pooled.close()
                finally:
                    pooled.connection.abort("given back")

    def _find_idle(self) -> PooledConnection | None:
        before = asyncio.get_running_loop().time() - IDLE_SECONDS
        return next(
            (pooled for pooled in self._connections[1:] if not pooled.in_flight and pooled.used_at <= before), None
        )
