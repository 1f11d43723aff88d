"""Making sure that a consumer's queue is there and fit for it, before anything is consumed.

A queue that is there is left as it is, and only looked at: what cannot work is refused, what loses messages is warned
about.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from pamqp import commands

from outrider.brokers.rabbitmq.protocol import Wire
from outrider.brokers.rabbitmq.queues import QUEUE_TYPE, SINGLE_ACTIVE, Queue, exists, inspect, queue_arguments
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.brokers.rabbitmq.topology import apply, steps
from outrider.errors import Misuse

log = logging.getLogger("outrider.rabbitmq")


async def prepare(
    wire: Wire, settings: RabbitSettings, name: str, topics: Iterable[str], guess: Queue | None, *, exclusive: bool
) -> Queue:
    """Make the queue and bind it to its topics, if told so; see that it is fit, and return what is known of it."""
    there = await exists(wire, name)
    if not there and not settings.declare:
        raise Misuse(
            f"RabbitMQ at {settings.place} has no queue {name!r}; make it, or let it be made: add ?declare= to the URL"
        )
    if settings.declare:
        own = replace(settings, queues=tuple((name, topic) for topic in topics))
        methods = steps(own, queue_arguments(wire.server_version))
        await apply(wire, settings, [m for m in methods if not (there and isinstance(m, commands.Queue.Declare))])
    known = guess if there else None
    queue = await inspect(wire, name, known)
    check(queue, exclusive=exclusive)
    if known is None:
        warn(queue)
    return queue


def check(queue: Queue, *, exclusive: bool) -> None:
    """Raise Misuse for a queue that cannot be consumed from as it has to be."""
    if queue.arguments.get(QUEUE_TYPE) == "stream":
        raise Misuse(
            f"{queue.name!r} is a stream: it does not remember what is acked; consume from a quorum queue instead"
        )
    if not exclusive:
        return
    if queue.objection:
        raise Misuse(
            f"the consumer of the queue {queue.name!r} has a gate, so the queue must have a single active consumer "
            f"({queue.objection}); turn the gate off, or stop what publishes to the queue, empty it first (turn the "
            "gate off, consume until idle), then delete it and declare it again with x-single-active-consumer=true "
            "(?declare= in the URL does)"
        )
    if queue.unknown:
        raise Misuse(
            f"the consumer of the queue {queue.name!r} has a gate, so the queue must have a single active consumer, "
            f"and the server does not tell whether it has ({queue.unknown}); grant the right to configure the queue, "
            "or turn the gate off"
        )


def warn(queue: Queue) -> None:
    """Say how the queue may lose messages, or their order."""
    if not queue.unknown and not queue.arguments.get(SINGLE_ACTIVE):
        log.info("a queue may deliver to several processes at once, each in order", extra={"queue": queue.name})
    if queue.drops:
        log.warning(
            "a queue drops what is delivered too often",
            extra={
                "queue": queue.name,
                "delivery_limit": queue.delivery_limit,
                "remedy": "give it a dead-letter exchange, or declare it with x-delivery-limit=-1 (RabbitMQ 4)",
            },
        )
    if not queue.flags["durable"]:
        log.warning("a queue does not survive a restart of the server", extra={"queue": queue.name})
    if queue.flags["auto_delete"]:
        log.warning("a queue is deleted with its last consumer", extra={"queue": queue.name})
