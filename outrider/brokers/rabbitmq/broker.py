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
from typing import Any
from urllib.parse import unquote

from pamqp import commands

from outrider.broker import Traits
from outrider.brokers.cloudevents import CloudEvents
from outrider.brokers.rabbitmq.examine import examine
from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire, connect
from outrider.brokers.rabbitmq.publisher import NOT_FOUND, Publisher, Wave
from outrider.brokers.rabbitmq.settings import RabbitSettings, check_queues
from outrider.brokers.rabbitmq.topology import declare
from outrider.errors import Transient, Unreachable
from outrider.event import Message
from outrider.finding import Finding
from outrider.outcome import Rejected, Unresolved, Verdict

PUBLISHERS_MAX = 256


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
        self._wire: Wire | None = None
        self._publishers: dict[str, Publisher] = {}
        self._connecting = asyncio.Lock()
        self._doubted: set[str] = set()

    async def start(self) -> None:
        """Connect, and declare the topology if told so."""
        wire = await self._connected()
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
        verdicts: list[Verdict | None] = [self._oversize(message) for message in messages]
        groups: dict[str, list[int]] = {}
        for index, verdict in enumerate(verdicts):
            if verdict is None:
                groups.setdefault(self.settings.route(messages[index])[0], []).append(index)
        parts = [self._publish(exchange, [messages[n] for n in group]) for exchange, group in groups.items()]
        for group, part in zip(groups.values(), await asyncio.gather(*parts), strict=True):
            for index, verdict in zip(group, part, strict=True):
                verdicts[index] = verdict
        return [verdict or Unresolved("nothing was heard") for verdict in verdicts]

    async def probe(self, destination: str) -> None:
        """Ask the server about the exchange.

        Whether a queue is full cannot be asked. So the probe after a nack fails, which tells the relay that nobody is
        to blame; the next one passes, and lets a message try.
        """
        wire = await self._connected()
        wire.check()
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
        return await examine(await self._connected(), self.settings, topics)

    def destination(self, message: Message) -> str:
        """Name the exchange and the routing key; a slash in the exchange's name is escaped."""
        exchange, routing_key = self.settings.route(message)
        return f"{exchange.replace('%', '%25').replace('/', '%2F')}/{routing_key}"

    async def close(self) -> None:
        """Disconnect; using the broker again connects again."""
        wire, self._wire = self._wire, None
        self._publishers = {}
        if wire is not None:
            await wire.close()

    def _oversize(self, message: Message) -> Verdict | None:
        size, limit = len(message.body), self.settings.message_bytes_max
        return Rejected(f"{size} bytes are more than may be published ({limit})") if size > limit else None

    async def _publish(self, exchange: str, messages: list[Message]) -> Sequence[Verdict | None]:
        try:
            wire = await self._connected()
            publisher = await self._publisher(wire, exchange)
            wire.check()
        except Transient as error:
            return [Unresolved(str(error))] * len(messages)
        wave = publisher.publish(messages, self.settings.route)
        try:
            await self._confirmed(wire, wave)
        finally:
            # A caller that gave up must not leave its messages behind: a late confirm then finds nobody.
            if wave.left:
                publisher.forget(wave)
        self._note_doubts(wave)
        return wave.verdicts

    async def _confirmed(self, wire: Wire, wave: Wave) -> None:
        """Wait for the wave. If time runs out, a silent server is down; one that speaks has a queue that is."""
        half = self.settings.confirm_seconds / 2
        if (await asyncio.wait([wave.done], timeout=half))[0]:
            return
        asked = asyncio.get_running_loop().time()
        wire.ping()
        if (await asyncio.wait([wave.done], timeout=half))[0]:
            return
        if wire.heard_at < asked:
            wire.abort(f"nothing was heard from the server for {half:g} s")
        for index, message in enumerate(wave.messages):
            if wave.verdicts[index] is None:
                destination = self.destination(message)
                error = f"no confirm from {destination} within {2 * half:g} s"
                wave.verdicts[index] = Unresolved(error, destination)

    def _note_doubts(self, wave: Wave) -> None:
        if any(isinstance(verdict, Unresolved) for verdict in wave.verdicts):
            doubts = (verdict.destination for verdict in wave.verdicts if isinstance(verdict, Unresolved))
            self._doubted |= set(filter(None, doubts))

    async def _connected(self) -> Wire:
        async with self._connecting:
            if self._wire is None or self._wire.lost:
                self._wire, self._publishers = None, {}
                self._wire = await connect(self.settings)
            return self._wire

    async def _publisher(self, wire: Wire, exchange: str) -> Publisher:
        """Return the exchange's channel, opened if need be; of too many, one that has been idle is closed."""
        async with self._connecting:
            wire.check()
            found = self._publishers.pop(exchange, None)
            if found is None or not found.open:
                self._make_room()
                found = Publisher(wire, exchange, self.destination, self.settings.make_exchange)
                await found.start()
            # Put back last: the order of the table is the order of use.
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
