"""Declaring what the relay publishes to: a durable topic exchange, and quorum queues bound to it.

Off unless asked for: most teams declare their topology elsewhere. Declaring what is there already changes nothing.
"""

from __future__ import annotations

from pamqp import base, commands

from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import Misuse

QUORUM = {"x-queue-type": "quorum"}


async def declare(wire: Wire, settings: RabbitSettings) -> None:
    """Declare exchange, queues and bindings."""
    number = await wire.open_channel()
    try:
        for method in steps(settings):
            await wire.call(number, method)
    except ChannelClosed as error:
        raise Misuse(
            f"RabbitMQ at {settings.place} refused to declare the topology ({error}); "
            "remove what exists with other properties, grant the rights, or leave declare out"
        ) from error
    wire.close_channel(number)


def steps(settings: RabbitSettings) -> list[base.Frame]:
    """List the declarations. The exchange without a name exists always, and every queue is bound to it.

    >>> [step.name for step in steps(RabbitSettings(queues=(("audit", "#"),)))]
    ['Exchange.Declare', 'Queue.Declare', 'Queue.Bind']
    """
    exchange = settings.exchange
    methods: list[base.Frame] = []
    if exchange:
        methods.append(commands.Exchange.Declare(exchange=exchange, exchange_type="topic", durable=True))
    for queue, pattern in settings.queues:
        methods.append(commands.Queue.Declare(queue=queue, durable=True, arguments=dict(QUORUM)))
        if exchange:
            methods.append(commands.Queue.Bind(queue=queue, exchange=exchange, routing_key=pattern))
    return methods
