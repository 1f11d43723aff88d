"""The RabbitMQ broker: verdicts from confirms, returns and closed channels; reconnects when it is next used.

What the server says, and what it means here:

- *ack*: confirmed. After a *return* it is not: the message was unroutable, and is rejected.
- *nack*, or no confirm in time: a queue is full or broken, which is no message's doing. The destination is down.
- *channel closed*: by 403 or 404 the exchange is down; else a message that was alone is rejected, several are in doubt.
- *blocked*, or the connection is lost: everything is down.

A destination is an exchange and a routing key, so that a full queue behind one key stops no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import unquote

from pamqp import commands

from outrider.broker import Traits
from outrider.brokers.cloudevents import CloudEvents
from outrider.brokers.rabbitmq.examine import examine
from outrider.brokers.rabbitmq.links import Links
from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire
from outrider.brokers.rabbitmq.publisher import NOT_FOUND
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings, check_queues
from outrider.brokers.rabbitmq.topology import declare
from outrider.errors import Transient, Unreachable
from outrider.event import Message
from outrider.finding import Finding
from outrider.outcome import CONFIRMED, Rejected, Unresolved, Verdict


class RabbitBroker:
    """Publishes to RabbitMQ. Options are those of `RabbitSettings`, and win over the URL's.

    >>> RabbitBroker("amqp://localhost", exchange="shop").destination(Message("1", "orders", "A", None, b"", {}))
    'shop/orders'
    """

    def __init__(self, url: str = "amqp://localhost", **options: Any) -> None:
        self.settings = RabbitSettings.from_url(url, **options)
        check_queues(self.settings.queues)
        source = self.settings.cloudevents
        self._dress = None if source is None else CloudEvents(source, "ce-").dress
        bytes_max, seconds = self.settings.message_bytes_max, self.settings.confirm_seconds
        self.traits = Traits(ordered=False, message_bytes_max=bytes_max, publish_seconds=seconds)
        self._links = Links(self.settings, self.destination)
        self._doubted: set[str] = set()

    async def start(self) -> None:
        """Connect, and declare the topology if told so."""
        wire = (await self._links.quietest()).wire
        if not self.settings.declare:
            return
        try:
            await declare(wire, self.settings)
        except Transient as error:
            raise Unreachable(f"RabbitMQ at {self.settings.place} cannot be used ({error}); try again") from error

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send each exchange its messages in one write, and wait for the confirms."""
        if self._dress is not None:
            messages = [self._dress(message) for message in messages]
        limit = self.settings.message_bytes_max
        if self.settings.exchange != PER_TOPIC and all(len(message.body) <= limit for message in messages):
            return await self._publish(self.settings.exchange, messages)
        verdicts: list[Verdict | None] = [self._oversize(message) for message in messages]
        groups: dict[str, list[int]] = {}
        for index, verdict in enumerate(verdicts):
            if verdict is None:
                groups.setdefault(self.settings.route(messages[index])[0], []).append(index)
        parts = [self._publish(exchange, [messages[n] for n in group]) for exchange, group in groups.items()]
        for group, part in zip(groups.values(), await asyncio.gather(*parts), strict=True):
            for index, verdict in zip(group, part, strict=True):
                verdicts[index] = verdict
        return cast(list[Verdict], verdicts)

    async def probe(self, destination: str) -> None:
        """Ask the server about the exchange.

        Whether a queue is full cannot be asked. So the probe after a nack fails, which tells the relay that nobody is
        to blame; the next one passes, and lets a message try.
        """
        wire = await self._links.wire()
        number = await wire.open_channel()
        if exchange := unquote(destination.partition("/")[0]):
            await self._look_for(wire, number, exchange)
        wire.close_channel(number)
        if destination in self._doubted:
            self._doubted.discard(destination)
            raise Transient(f"{destination} has lately refused a message; a queue behind it may be full or broken")

    async def _look_for(self, wire: Wire, number: int, exchange: str) -> None:
        try:
            await wire.call(number, commands.Exchange.Declare(exchange=exchange, passive=True))
        except ChannelClosed as error:
            if error.code != NOT_FOUND:
                raise
            raise Transient(f"{error}; {self.settings.make_exchange}") from error

    async def examine(self, topics: Sequence[str]) -> list[Finding]:
        """Look at exchanges, queues and bindings."""
        return await examine((await self._links.quietest()).wire, self.settings, topics)

    def destination(self, message: Message) -> str:
        """Name the exchange and the routing key; a slash in the exchange's name is escaped."""
        exchange, routing_key = self.settings.route(message)
        return f"{exchange.replace('%', '%25').replace('/', '%2F')}/{routing_key}"

    async def close(self) -> None:
        """Disconnect; using the broker again connects again."""
        await self._links.close()

    async def _publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[Verdict]:
        heard = await self._links.publish(exchange, messages)
        if heard.count(CONFIRMED) == len(messages):
            return cast(Sequence[Verdict], heard)
        verdicts = [verdict or Unresolved("nothing was heard") for verdict in heard]
        doubts = (verdict.destination for verdict in verdicts if isinstance(verdict, Unresolved))
        self._doubted |= set(filter(None, doubts))
        return verdicts

    def _oversize(self, message: Message) -> Verdict | None:
        size, limit = len(message.body), self.settings.message_bytes_max
        return Rejected(f"{size} bytes are more than may be published ({limit})") if size > limit else None
