"""The RabbitMQ source: one queue, one connection, one partition.

The actions of the server, and their meaning here:

- *connection or channel lost, consumer cancelled*: the partition is revoked, and `receive` raises Transient. The server
  delivers messages without an ack again on the next connection, which is a new partition.
- *an acked delivery* is removed. Acks are sent one by one if necessary, so a waiting key does not delay other acks.
- *a delivery without an ack* for `consumer_timeout` (30 minutes) makes the server close the channel, as above.
- *a delivery limit* counts only lost connections and restarts, since retries happen without redelivery. The source logs
  a warning about a queue that loses messages by its delivery limit.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from pamqp import commands

from outrider.brokers.base import Revoked
from outrider.brokers.rabbitmq.checks import check_source_queue
from outrider.brokers.rabbitmq.connection import AmqpConnection, ChannelClosed, open_connection
from outrider.brokers.rabbitmq.frames import FRAME_END, HEADER, METHOD, read_content
from outrider.brokers.rabbitmq.queues import Queue, ensure_queue
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings
from outrider.checks import CheckResult
from outrider.errors import InvalidSetting, Transient, UsageError
from outrider.event import Delivery
from outrider.redaction import without_values

WAIT_SECONDS = 0.2

PREFETCH_MAX = 65_535

DELIVERIES_ODD = 5
"""A message with this many redeliveries may be the cause of consumer crashes."""

PERMANENT = (403, 405, 406)
"""Reply codes that will be the same next time: access denied, locked by another client, declared differently."""

log = logging.getLogger("outrider.rabbitmq")

_DELIVER, _CANCEL = struct.pack(">HH", 60, 60), struct.pack(">HH", 60, 30)

_PAYLOAD, _ARGUMENTS = 7, 11
"""Offset of the payload in a frame, and of the arguments in a method."""

_TAG = struct.Struct(">Q")

_ACK = struct.Struct(">BHIHHQB")

_ACK_BYTES = 13


class RabbitSource:
    """Consumes from a queue. The queue has the consumer's name by default.

    `exclusive` demands a queue that delivers to one process at a time, as a consumer with ordering needs; `keeps_order`
    only warns about another queue.
    `in_flight_max` is the number of deliveries that the server sends before the first ack. The options are those of
    `RabbitSettings`, and override the URL; `declare` creates the queue and binds the topics.

    >>> RabbitSource("amqp://localhost/shop?declare=", "billing", ["orders"]).queue
    'billing'
    """

    def __init__(
        self,
        url: str,
        consumer: str,
        topics: Sequence[str],
        *,
        queue: str = "",
        in_flight_max: int = 1000,
        exclusive: bool = False,
        keeps_order: bool = False,
        revoke_seconds: float = 10.0,
        **options: Any,
    ) -> None:
        if in_flight_max <= 0:
            raise InvalidSetting(f"in_flight_max = {in_flight_max} cannot work; it must be above 0")
        self.settings = RabbitSettings.from_url(url, **options)
        self.queue, self.topics = queue or consumer, list(topics)
        self._consumer = consumer
        self._needs = {"exclusive": exclusive, "keeps_order": keeps_order}
        self._prefetch, self._revoke_seconds = min(in_flight_max, PREFETCH_MAX), revoke_seconds
        self._connection: DeliveryBuffer | None = None
        self._subscription: Subscription | None = None
        self._known: Queue | None = None
        self._channel = self._starts = 0
        self._warned = False
        _check_names(self)

    async def start(self, revoked: Revoked) -> None:
        """Connect and consume. After a loss, `start` first waits a limited time for deliveries in progress."""
        if self._subscription is not None:
            await self._release(revoked, self._subscription)
        connection = DeliveryBuffer(self.settings)
        await open_connection(connection, self.settings)
        try:
            await self._subscribe(connection)
        except BaseException:
            connection.abort("the consumer could not start")
            raise

    async def check(self) -> list[CheckResult]:
        """Check that the queue exists, fits the consumer, and is bound to its topics. Read-only."""
        return [await check_source_queue(self.settings, self.queue, self.topics, **self._needs)]

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Return the received deliveries; wait briefly if there are none."""
        subscription = self._current()
        subscription.changed.clear()
        self._send_acks()
        if subscription.partition in paused:
            limit = 0
        if not subscription.lost and (limit <= 0 or not subscription.count):
            await _wait_for_change(subscription)
            self._send_acks()
        if subscription.lost:
            raise Transient(f"RabbitMQ at {self.settings.address}, queue {self.queue!r}: {subscription.lost}")
        deliveries = subscription.take_deliveries(max(limit, 0))
        if not self._warned:
            self._warn(deliveries)
        return deliveries

    def ack(self, delivery: Delivery) -> None:
        """Mark a delivery as done; `receive` sends the ack to the server."""
        if self._subscription is not None and delivery.partition == self._subscription.partition:
            self._subscription.ack(delivery.token)

    async def close(self) -> None:
        """Send the outstanding acks and disconnect; the server delivers the other messages again."""
        self._send_acks()
        connection, subscription = self._connection, self._subscription
        self._connection = self._subscription = None
        if connection is None or subscription is None:
            return
        try:
            if not subscription.lost:
                # Any answer will do: the server answers after it has processed the acks.
                await connection.call(self._channel, commands.Basic.Qos(prefetch_count=self._prefetch))
        except Transient as error:
            log.info("acks may be lost; their messages will be delivered again", extra={"error": without_values(error)})
        finally:
            await connection.close()

    async def _subscribe(self, connection: DeliveryBuffer) -> None:
        partition = f"{self._consumer}#{self._starts + 1}"
        subscription = Subscription(partition, per_topic=self.settings.exchange == PER_TOPIC)
        try:
            self._known = await ensure_queue(
                connection, self.settings, self.queue, self.topics, self._known, **self._needs
            )
            channel = await connection.open_channel(subscription)
            await connection.call(channel, commands.Basic.Qos(prefetch_count=self._prefetch))
            await connection.call(channel, commands.Basic.Consume(queue=self.queue))
        except ChannelClosed as error:
            raise self._consume_error(error) from error
        self._connection, self._channel, self._subscription = connection, channel, subscription
        self._starts += 1
        self._warned = False

    async def _release(self, revoked: Revoked, subscription: Subscription) -> None:
        """Let deliveries in progress finish, for a bounded time; send the acks if the connection still works."""
        limit = asyncio.timeout(self._revoke_seconds)
        try:
            async with limit:
                await revoked(frozenset([subscription.partition]))
        except TimeoutError:
            if not limit.expired():
                raise
            log.warning("a partition was not released in time", extra={"partition": subscription.partition})
        await self.close()

    def _current(self) -> Subscription:
        if self._subscription is None:
            raise Transient(f"the source of the queue {self.queue!r} is not connected; start it")
        return self._subscription

    def _send_acks(self) -> None:
        if (
            self._connection is not None
            and self._subscription is not None
            and (frames := self._subscription.frames(self._channel))
        ):
            self._connection.write(frames)

    def _consume_error(self, error: ChannelClosed) -> UsageError | Transient:
        text = f"RabbitMQ at {self.settings.address} does not let the queue {self.queue!r} be consumed ({error})"
        if error.code in PERMANENT:
            return UsageError(f"{text}; grant the rights, or name another queue")
        return Transient(f"{text}; try again")

    def _warn(self, deliveries: Sequence[Delivery]) -> None:
        """Log once per connection that a message is redelivered often: the consumer was lost before every ack."""
        for delivery in deliveries:
            if (count := _count(delivery)) >= DELIVERIES_ODD:
                message_id = delivery.headers.get("message_id", b"").decode(errors="replace")
                fields = {"queue": self.queue, "message_id": message_id, "deliveries": count}
                log.warning("a message is delivered again and again", extra=fields)
                self._warned = True
                return


def _count(delivery: Delivery) -> int:
    """Return the number of earlier deliveries. Only quorum queues count; other senders may write any value."""
    text = delivery.headers.get("x-delivery-count", b"")
    return int(text) if text.isdigit() and len(text) < 10 else 0


async def _wait_for_change(subscription: Subscription) -> None:
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await subscription.changed.wait()
    except TimeoutError:
        return


def _check_names(source: RabbitSource) -> None:
    """Reject names that do not fit AMQP."""
    try:
        commands.Queue.Declare(queue=source.queue).marshal()
        for topic in source.topics if source.settings.declare else ():
            commands.Queue.Bind(queue=source.queue, exchange=source.settings.exchange, routing_key=topic).marshal()
    except (ValueError, TypeError) as error:
        raise InvalidSetting(
            f"the queue {source.queue!r} or one of its topics has a name that RabbitMQ does not take ({error}); "
            "use letters, digits and -_.:@#,/+ up to 255 bytes"
        ) from error


class Subscription:
    """Received deliveries of a channel that are not handed over yet, and acks that are not sent yet.

    `per_topic`: every topic has its own exchange. Then a message without headers of Outrider belongs to the topic named
    by the exchange, and the routing key is the key; otherwise the routing key names the topic.
    """

    def __init__(self, partition: str, *, per_topic: bool = False) -> None:
        self.partition, self._per_topic = partition, per_topic
        self.lost = ""
        self.changed = asyncio.Event()
        self._received: deque[Delivery] = deque()
        self._acks = Acks()
        self._tag, self._exchange, self._routing_key = 0, b"", b""
        self._headers: dict[str, bytes] = {}
        self._pieces: list[bytes] = []
        self._missing_bytes = 0

    @property
    def count(self) -> int:
        """Return the number of deliveries that wait to be handed over."""
        return len(self._received)

    def take_deliveries(self, limit: int) -> list[Delivery]:
        """Hand over the oldest deliveries."""
        return [self._received.popleft() for _ in range(min(limit, len(self._received)))]

    def ack(self, tag: int) -> None:
        """Mark a delivery as done."""
        self._acks.done(tag)
        self.changed.set()

    def frames(self, channel: int) -> bytes:
        """Return the acks that are not sent yet, as frames."""
        acks: Sequence[tuple[int, bool]] = self._acks.take()
        return b"".join(
            _ACK.pack(METHOD, channel, _ACK_BYTES, 60, 80, tag, multiple) + FRAME_END for tag, multiple in acks
        )

    def take(self, kind: int, raw: bytes) -> bool:
        """Process a frame of the channel; return False for a method that is not a delivery or a cancellation."""
        if kind == METHOD:
            method = raw[_PAYLOAD:_ARGUMENTS]
            if method == _DELIVER:
                self._begin(raw)
            elif method == _CANCEL:
                self.fail("the server cancelled the consumer: the queue was deleted, or is moving")
            return method in (_DELIVER, _CANCEL)
        payload = raw[_PAYLOAD:-1]
        if kind == HEADER:
            self._missing_bytes, self._headers = read_content(payload)
        else:
            self._pieces.append(payload)
            self._missing_bytes -= len(payload)
        if self._missing_bytes <= 0:
            self._complete()
        return True

    def confirm(self, tag: int, *, multiple: bool, accepted: bool) -> None:
        """Do nothing: a subscription publishes no messages."""

    def returned(self, message_id: str, text: str) -> None:
        """Do nothing: a subscription publishes no messages."""

    def closed(self, error: ChannelClosed) -> None:
        """Handle the closing of the channel by the server, which accepts no more acks."""
        self._acks = Acks()
        self.fail(f"the server closed the channel: {error.code} {error}")

    def fail(self, error: str) -> None:
        """Handle the end of the connection."""
        self.lost = self.lost or error
        self.changed.set()

    def _begin(self, raw: bytes) -> None:
        at = _ARGUMENTS + 1 + raw[_ARGUMENTS]
        (self._tag,) = _TAG.unpack_from(raw, at)
        at += _TAG.size + 1
        exchange_end = at + 1 + raw[at]
        self._exchange = raw[at + 1 : exchange_end]
        self._routing_key = raw[exchange_end + 1 : exchange_end + 1 + raw[exchange_end]]
        self._pieces = []

    def _complete(self) -> None:
        headers, body = self._headers, b"".join(self._pieces)
        self._pieces, self._headers = [], {}
        origin = self._exchange if self._per_topic else self._routing_key
        topic = headers.get("topic", origin).decode(errors="backslashreplace")
        key = headers.get("key", self._routing_key if self._per_topic else None)
        self._acks.delivered(self._tag)
        self._received.append(Delivery(topic, key, body, headers, self.partition, "", self._tag))
        self.changed.set()


class DeliveryBuffer(AmqpConnection):
    """A connection with channels that may consume."""

    def _frame(self, kind: int, channel: int, raw: bytes) -> None:
        receiver = self._receivers.get(channel)
        if not (isinstance(receiver, Subscription) and receiver.take(kind, raw)):
            super()._frame(kind, channel, raw)


class Acks:
    """The deliveries of a channel for which the server expects an ack.

    >>> acks = Acks()
    >>> for tag in (1, 2, 3, 4, 5): acks.delivered(tag)
    >>> for tag in (5, 2, 1, 2): acks.done(tag)
    >>> acks.take()
    [(2, True), (5, False)]
    """

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._done: set[int] = set()

    def delivered(self, tag: int) -> None:
        """Record a delivery; tags rise."""
        self._order.append(tag)
        self._open.add(tag)

    def done(self, tag: int) -> None:
        """Mark a delivery as done. Unknown tags and repeated calls are ignored."""
        if tag in self._open:
            self._open.remove(tag)
            self._done.add(tag)

    def take(self) -> list[tuple[int, bool]]:
        """Return the acks to send: the tag, and whether the ack covers all earlier tags."""
        upto = count = 0
        while self._order and self._order[0] not in self._open:
            tag = self._order.popleft()
            # A tag that was acked alone has been removed already, but is still in the queue.
            if tag in self._done:
                self._done.remove(tag)
                upto, count = tag, count + 1
        singles = sorted(self._done)
        self._done.clear()
        return [*([(upto, count > 1)] if count else []), *((tag, False) for tag in singles)]
