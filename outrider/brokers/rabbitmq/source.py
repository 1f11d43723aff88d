"""The RabbitMQ source: one queue, one connection, one shard.

What the server does, and what it means here:

- *connection or channel lost, consumer cancelled*: the shard is gone, and Transient is raised. What was not acked is
  delivered again on the next connection, which is another shard.
- *an acked delivery* is gone. Acks are told one by one if need be, so a key that waits holds up nobody's acks.
- *a delivery nobody acks* for `consumer_timeout` (30 minutes) makes the server close the channel, as above.
- *a delivery limit* counts lost connections and restarts only, since retries happen in place. A queue that loses
  messages by it is warned about.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from pamqp import commands

from outrider.brokers.rabbitmq.consumed import examine_queue
from outrider.brokers.rabbitmq.prepare import prepare
from outrider.brokers.rabbitmq.protocol import ChannelClosed, open_wire
from outrider.brokers.rabbitmq.queues import Queue
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings
from outrider.brokers.rabbitmq.subscription import Intake, Subscription
from outrider.delivery import Delivery
from outrider.errors import BadSetting, Misuse, Transient
from outrider.finding import Finding
from outrider.source import Revoked

WAIT_SECONDS = 0.2
PREFETCH_MAX = 65_535
DELIVERIES_ODD = 5
"""A message that came back so often may be what crashes its consumer."""
HOPELESS = (403, 405, 406)
"""Replies that will be the same next time: no right to, locked by another, declared otherwise."""

log = logging.getLogger("outrider.rabbitmq")


class RabbitSource:
    """Consumes from a queue, which has the consumer's name unless told otherwise.

    `exclusive` demands a queue that delivers to one process at a time, as a consumer with a gate needs. `in_flight_max`
    is how many deliveries the server hands out before the first of them is acked. Options are those of
    `RabbitSettings`, and win over the URL's; `declare` makes the queue and binds it to the topics.

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
        revoke_seconds: float = 10.0,
        **options: Any,
    ) -> None:
        if in_flight_max <= 0:
            raise BadSetting(f"in_flight_max = {in_flight_max} cannot work; it must be above 0")
        self.settings = RabbitSettings.from_url(url, **options)
        self.queue, self.topics = queue or consumer, list(topics)
        self._consumer, self._exclusive = consumer, exclusive
        self._prefetch, self._revoke_seconds = min(in_flight_max, PREFETCH_MAX), revoke_seconds
        self._wire: Intake | None = None
        self._subscription: Subscription | None = None
        self._known: Queue | None = None
        self._channel = self._shards = 0
        self._warned = False
        _check_names(self)

    async def start(self, revoked: Revoked) -> None:
        """Connect and consume. Called again after a loss, it first waits a while for what is still under way."""
        if self._subscription is not None:
            await self._let_go(revoked, self._subscription)
        wire = Intake(self.settings)
        await open_wire(wire, self.settings)
        try:
            await self._subscribe(wire)
        except BaseException:
            wire.abort("the consumer could not start")
            raise

    async def examine(self) -> list[Finding]:
        """Look whether the queue is there, fit for the consumer, and bound to its topics; changes nothing."""
        return [await examine_queue(self.settings, self.queue, self.topics, exclusive=self._exclusive)]

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Return what has come; wait for news a moment if there is nothing to return."""
        subscription = self._current()
        subscription.news.clear()
        self._tell()
        if subscription.shard in paused:
            limit = 0
        if not subscription.lost and (limit <= 0 or not subscription.count):
            await _news(subscription)
            self._tell()
        if subscription.lost:
            raise Transient(f"RabbitMQ at {self.settings.place}, queue {self.queue!r}: {subscription.lost}")
        deliveries = subscription.give(max(limit, 0))
        if not self._warned:
            self._warn(deliveries)
        return deliveries

    def ack(self, delivery: Delivery) -> None:
        """Note that a delivery is done; `receive` tells the server."""
        if self._subscription is not None and delivery.shard == self._subscription.shard:
            self._subscription.ack(delivery.token)

    async def close(self) -> None:
        """Tell the server what is done, and leave; it delivers the rest again."""
        self._tell()
        wire, subscription = self._wire, self._subscription
        self._wire = self._subscription = None
        if wire is None or subscription is None:
            return
        try:
            if not subscription.lost:
                # Any answer will do: it comes when the acks before it were taken.
                await wire.call(self._channel, commands.Basic.Qos(prefetch_count=self._prefetch))
        except Transient as error:
            log.info("acks may not have been heard; what they stood for comes again", extra={"error": str(error)})
        finally:
            await wire.close()

    async def _subscribe(self, wire: Intake) -> None:
        shard = f"{self._consumer}#{self._shards + 1}"
        subscription = Subscription(shard, per_topic=self.settings.exchange == PER_TOPIC)
        try:
            self._known = await prepare(
                wire, self.settings, self.queue, self.topics, self._known, exclusive=self._exclusive
            )
            channel = await wire.open_channel(subscription)
            await wire.call(channel, commands.Basic.Qos(prefetch_count=self._prefetch))
            await wire.call(channel, commands.Basic.Consume(queue=self.queue))
        except ChannelClosed as error:
            raise self._refused(error) from error
        self._wire, self._channel, self._subscription = wire, channel, subscription
        self._shards += 1
        self._warned = False

    async def _let_go(self, revoked: Revoked, subscription: Subscription) -> None:
        """Let what is under way end, for a bounded time; if the connection still stands, tell what is done."""
        letting_go = asyncio.timeout(self._revoke_seconds)
        try:
            async with letting_go:
                await revoked(frozenset([subscription.shard]))
        except TimeoutError:
            if not letting_go.expired():
                raise
            log.warning("a shard was not let go of in time", extra={"shard": subscription.shard})
        await self.close()

    def _current(self) -> Subscription:
        if self._subscription is None:
            raise Transient(f"the source of the queue {self.queue!r} is not connected; start it")
        return self._subscription

    def _tell(self) -> None:
        if (
            self._wire is not None
            and self._subscription is not None
            and (frames := self._subscription.frames(self._channel))
        ):
            self._wire.write(frames)

    def _refused(self, error: ChannelClosed) -> Misuse | Transient:
        text = f"RabbitMQ at {self.settings.place} refused to let the queue {self.queue!r} be consumed ({error})"
        if error.code in HOPELESS:
            return Misuse(f"{text}; grant the rights, or name another queue")
        return Transient(f"{text}; try again")

    def _warn(self, deliveries: Sequence[Delivery]) -> None:
        """Say once per connection that a message keeps coming: each time, its consumer was gone before it was done."""
        for delivery in deliveries:
            if (count := _count(delivery)) >= DELIVERIES_ODD:
                message_id = delivery.headers.get("message_id", b"").decode(errors="replace")
                fields = {"queue": self.queue, "message_id": message_id, "deliveries": count}
                log.warning("a message keeps coming again", extra=fields)
                self._warned = True
                return


def _count(delivery: Delivery) -> int:
    """Return how often a delivery has come before; only quorum queues count, and others may write what they like."""
    text = delivery.headers.get("x-delivery-count", b"")
    return int(text) if text.isdigit() and len(text) < 10 else 0


async def _news(subscription: Subscription) -> None:
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await subscription.news.wait()
    except TimeoutError:
        return


def _check_names(source: RabbitSource) -> None:
    """Refuse at once what AMQP has no room for."""
    try:
        commands.Queue.Declare(queue=source.queue).marshal()
        for topic in source.topics if source.settings.declare else ():
            commands.Queue.Bind(queue=source.queue, exchange=source.settings.exchange, routing_key=topic).marshal()
    except (ValueError, TypeError) as error:
        raise BadSetting(
            f"the queue {source.queue!r} or one of its topics has a name that RabbitMQ does not take ({error}); "
            "use letters, digits and -_.:@#,/+ up to 255 bytes"
        ) from error
