"""The RabbitMQ broker: results from confirms, returns and closed channels; reconnects on the next use.

The answers of the server, and their meaning here:

- *ack*: confirmed, except after a *return*: then the message was unroutable, and is rejected.
- *nack*, or no confirm in time: a queue is full or broken; the message is not the cause. The destination is down.
- *no confirm* while others arrive: the destination is left behind as unanswered, and its channel is not used again.
- *channel closed*: with 403 or 404 the exchange is down; otherwise a message sent alone is rejected, and the results of
  several messages are unknown.
- *blocked*, or connection lost: all destinations are down.

A destination is an exchange with a routing key, so a full queue behind a routing key stops no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast
from urllib.parse import unquote
from zlib import crc32

from pamqp import commands

from outrider.brokers.base import CONFIRMED, Capabilities, PublishResult, Rejected, Unanswered, Unknown
from outrider.brokers.cloudevents import CloudEvents
from outrider.brokers.rabbitmq.checks import check
from outrider.brokers.rabbitmq.confirm_channel import NOT_FOUND
from outrider.brokers.rabbitmq.connection import AmqpConnection, ChannelClosed
from outrider.brokers.rabbitmq.connection_pool import ChannelName, ConnectionPool
from outrider.brokers.rabbitmq.queues import declare
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings, check_queues
from outrider.checks import CheckResult
from outrider.errors import Transient, Unreachable
from outrider.event import Message

CHANNELS_OWN = 64
"""The number of routing keys with a channel of their own."""

CHANNELS_SHARED = 16
"""The number of channels for all other routing keys."""

Publish = Callable[[ChannelName, Sequence[Message]], Awaitable[Sequence[PublishResult | None]]]
"""Publishes messages on a channel."""


class RabbitBroker:
    """Publishes to RabbitMQ. The options are those of `RabbitSettings`, and override the URL.

    >>> RabbitBroker("amqp://localhost", exchange="shop").destination(Message("1", "orders", "A", None, b"", {}))
    'shop/orders'
    """

    def __init__(self, url: str = "amqp://localhost", **options: Any) -> None:
        self.settings = RabbitSettings.from_url(url, **options)
        check_queues(self.settings.queues)
        source = self.settings.cloudevents
        self._dress = None if source is None else CloudEvents(source, "ce-").dress
        self.capabilities = Capabilities(
            ordered=False,
            message_bytes_max=self.settings.message_bytes_max,
            publish_seconds=self.settings.confirm_seconds,
            name=f"RabbitMQ at {self.settings.address}",
        )
        self._pool = ConnectionPool(self.settings, self.destination)
        self._unconfirmed: set[str] = set()
        self._channels: dict[str, ChannelName] = {}

    async def start(self) -> None:
        """Connect, and declare the topology if the settings demand it."""
        connection = (await self._pool.least_busy()).connection
        if not self.settings.declare:
            return
        try:
            await declare(connection, self.settings)
        except Transient as error:
            raise Unreachable(f"RabbitMQ at {self.settings.address} cannot be used ({error}); try again") from error

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Send the messages of each channel in one write, and wait for the confirms."""
        results = await self.publish_promptly(messages)
        return [await result.answer if isinstance(result, Unanswered) else result for result in results]

    async def publish_promptly(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish like `publish`, and leave a queue behind that does not confirm while the server answers."""
        return await self._publish_by_channel(messages, self._pool.publish)

    async def publish_apart(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish on a channel that no other publish uses: a queue without confirms stops only its own channel."""
        return await self._publish_by_channel(messages, self._pool.publish_apart)

    async def _publish_by_channel(self, messages: Sequence[Message], publish: Publish) -> Sequence[PublishResult]:
        if self._dress is not None:
            messages = [self._dress(message) for message in messages]
        limit, exchange = self.settings.message_bytes_max, self.settings.exchange
        if exchange != PER_TOPIC and all(len(message.body) <= limit for message in messages):
            routing_keys = {message.routing_key or message.topic for message in messages}
            if len(routing_keys) == 1:
                return await self._publish(publish, self._channel_of(exchange, *routing_keys), messages)
        results: list[PublishResult | None] = [self._oversize(message) for message in messages]
        groups: dict[ChannelName, list[int]] = {}
        for index, result in enumerate(results):
            if result is None:
                groups.setdefault(self._channel_of(*self.settings.route(messages[index])), []).append(index)
        parts = [self._publish(publish, name, [messages[n] for n in group]) for name, group in groups.items()]
        for group, part in zip(groups.values(), await asyncio.gather(*parts), strict=True):
            for index, result in zip(group, part, strict=True):
                results[index] = result
        return cast(list[PublishResult], results)

    def _channel_of(self, exchange: str, routing_key: str) -> ChannelName:
        """Return the name of a channel: the first routing keys have their own, and the others share some."""
        if self.settings.exchange == PER_TOPIC:
            return exchange, ""
        if (found := self._channels.get(routing_key)) is not None:
            return found
        if len(self._channels) >= CHANNELS_OWN:
            return exchange, f"#{crc32(routing_key.encode(errors='replace')) % CHANNELS_SHARED}"
        self._channels[routing_key] = exchange, routing_key
        return self._channels[routing_key]

    async def probe(self, destination: str) -> None:
        """Ask the server about the exchange.

        AMQP cannot tell whether a queue is full. So the first probe after a nack fails, and the relay learns that no
        message is the cause; the next probe passes, and lets the relay try a message.
        """
        connection = await self._pool.connection()
        number = await connection.open_channel()
        if exchange := unquote(destination.partition("/")[0]):
            await self._look_for(connection, number, exchange)
        connection.close_channel(number)
        if destination in self._unconfirmed:
            self._unconfirmed.discard(destination)
            raise Transient(f"{destination} has lately rejected a message; a queue behind it may be full or broken")

    async def _look_for(self, connection: AmqpConnection, number: int, exchange: str) -> None:
        try:
            await connection.call(number, commands.Exchange.Declare(exchange=exchange, passive=True))
        except ChannelClosed as error:
            if error.code != NOT_FOUND:
                raise
            raise Transient(f"{error}; {self.settings.make_exchange}") from error

    async def check(self, topics: Sequence[str]) -> list[CheckResult]:
        """Check exchanges, queues and bindings."""
        return await check((await self._pool.least_busy()).connection, self.settings, topics)

    def destination(self, message: Message) -> str:
        """Return the exchange and the routing key; a slash in the exchange's name is escaped."""
        exchange, routing_key = self.settings.route(message)
        return f"{exchange.replace('%', '%25').replace('/', '%2F')}/{routing_key}"

    async def close(self) -> None:
        """Disconnect; the next use connects again."""
        await self._pool.close()

    async def _publish(
        self, publish: Publish, name: ChannelName, messages: Sequence[Message]
    ) -> Sequence[PublishResult]:
        results_or_none = await publish(name, messages)
        if results_or_none.count(CONFIRMED) == len(messages):
            return cast(Sequence[PublishResult], results_or_none)
        results = [result or Unknown("the server did not answer") for result in results_or_none]
        for result in results:
            if isinstance(result, Unanswered):
                result.answer.add_done_callback(self._on_answer)
            else:
                self._note(result)
        return results

    def _on_answer(self, answer: asyncio.Future[PublishResult]) -> None:
        if not answer.cancelled():
            self._note(answer.result())

    def _note(self, result: PublishResult) -> None:
        if isinstance(result, Unknown) and result.destination:
            self._unconfirmed.add(result.destination)

    def _oversize(self, message: Message) -> PublishResult | None:
        size, limit = len(message.body), self.settings.message_bytes_max
        return Rejected(f"{size} bytes are more than may be published ({limit})") if size > limit else None
