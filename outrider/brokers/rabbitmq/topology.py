"""Declaring what the relay publishes to: a durable topic exchange, and quorum queues bound to it.

Off unless asked for: most teams declare their topology elsewhere. Declaring what is there already changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pamqp import base, commands

from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire
from outrider.brokers.rabbitmq.queues import DELIVERY_LIMIT, QUEUE_TYPE, SINGLE_ACTIVE, difference
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import Misuse

QUORUM = {QUEUE_TYPE: "quorum"}
OF_THE_CONSUMER = (SINGLE_ACTIVE, DELIVERY_LIMIT)
"""In what a queue may differ from what is declared: its consumer has made it first, and knows what it needs."""


async def declare(wire: Wire, settings: RabbitSettings) -> None:
    """Declare exchange, queues and bindings."""
    await apply(wire, settings, steps(settings))


async def apply(wire: Wire, settings: RabbitSettings, methods: Iterable[base.Frame]) -> None:
    """Let the server do what is declared."""
    number = await wire.open_channel()
    for method in methods:
        try:
            await wire.call(number, method)
        except ChannelClosed as error:
            if (found := difference(str(error))) is None or found.name not in OF_THE_CONSUMER:
                raise Misuse(
                    f"RabbitMQ at {settings.place} refused to declare the topology ({error}); "
                    "remove what exists with other properties, grant the rights, or leave declare out"
                ) from error
            number = await wire.open_channel()
    wire.close_channel(number)


def steps(settings: RabbitSettings, arguments: Mapping[str, Any] = QUORUM) -> list[base.Frame]:
    """List the declarations. The exchange without a name exists always, and every queue is bound to it.

    >>> [step.name for step in steps(RabbitSettings(queues=(("audit", "#"),)))]
    ['Exchange.Declare', 'Queue.Declare', 'Queue.Bind']
    """
    exchange = settings.exchange
    methods: list[base.Frame] = []
    if exchange:
        methods.append(commands.Exchange.Declare(exchange=exchange, exchange_type="topic", durable=True))
    for queue, pattern in settings.queues:
        methods.append(commands.Queue.Declare(queue=queue, durable=True, arguments=dict(arguments)))
        if exchange:
            methods.append(commands.Queue.Bind(queue=queue, exchange=exchange, routing_key=pattern))
    return methods
