"""Looking at the queue of a consumer: is it there, fit for it, and does what is published reach it? Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outrider.brokers.rabbitmq.judging import route
from outrider.brokers.rabbitmq.management import Management, Topology
from outrider.brokers.rabbitmq.prepare import check
from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire, connect
from outrider.brokers.rabbitmq.queues import exists, inspect
from outrider.brokers.rabbitmq.routing import reached
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import Misuse, Transient
from outrider.finding import Finding, ok, refuse

CHECKS = {"rabbitmq-consumer": "a consumer's queue is there, fit for it, and bound to its topics"}
CHECK = "rabbitmq-consumer"


async def examine_queue(settings: RabbitSettings, name: str, topics: Sequence[str], *, exclusive: bool) -> Finding:
    """Look at a queue by AMQP, and at its bindings by the management API if the settings name it; judge."""
    wire = await connect(settings)
    try:
        trouble = await _unfit(wire, settings, name, exclusive=exclusive)
    finally:
        await wire.close()
    if trouble is not None:
        return trouble
    if settings.declare:
        return ok(CHECK, f"{name}: the consumer makes it and binds it at its start, where need be")
    return judge_bindings(await _seen(settings), settings, name, topics)


async def _unfit(wire: Wire, settings: RabbitSettings, name: str, *, exclusive: bool) -> Finding | None:
    try:
        if not await exists(wire, name):
            remedy = "make it and bind it, or let the consumer do so: add ?declare= to the broker's URL"
            return None if settings.declare else refuse(CHECK, f"{name}: there is no such queue", remedy)
        check(await inspect(wire, name), exclusive=exclusive)
    except ChannelClosed as error:
        remedy = "grant the user the right to configure and to read it"
        return refuse(CHECK, f"{name}: the server does not say how it is ({error})", remedy)
    except Misuse as error:
        text, _, remedy = str(error).rpartition("; ")
        return refuse(CHECK, text, remedy)
    return None


async def _seen(settings: RabbitSettings) -> Topology | None:
    """Ask for the bindings. That they cannot be seen is told with what else cannot."""
    if settings.management is None:
        return None
    try:
        return await asyncio.to_thread(Management(settings).topology)
    except Transient:
        return None


def judge_bindings(seen: Topology | None, settings: RabbitSettings, name: str, topics: Sequence[str]) -> Finding:
    """Judge whether a consumer's topics reach its queue.

    >>> judge_bindings(Topology({}, {}, ()), RabbitSettings(exchange="shop"), "billing", ["orders"]).text
    'billing: nothing that is published to orders reaches it'
    """
    if seen is None:
        return ok(CHECK, f"{name}: there; its bindings cannot be seen by AMQP alone")
    missed = [t for t in topics if name not in [queue.name for queue in reached(seen, *route(settings, t))]]
    if not missed:
        return ok(CHECK, f"{name}: there, and bound to its topics")
    text = f"{name}: nothing that is published to {', '.join(missed)} reaches it"
    return refuse(CHECK, text, f"bind it to the exchange {settings.exchange!r}, or add ?declare= to the broker's URL")
