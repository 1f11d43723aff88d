"""Looking at RabbitMQ: do messages reach a queue, and does the queue keep them?

AMQP tells little: whether an exchange is there, and, by declaring it again as it should be, whether it is durable.
Everything about queues and bindings needs the management API; without it, that is what is found.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from pamqp import base, commands

from outrider.brokers.rabbitmq import judging
from outrider.brokers.rabbitmq.judging import State
from outrider.brokers.rabbitmq.management import Management, Topology
from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings
from outrider.brokers.rabbitmq.topology import QUORUM
from outrider.errors import Transient
from outrider.finding import Finding, ok, warn

NOT_FOUND, PRECONDITION = 404, 406
KINDS_MAX = 3
_DIFFERS = re.compile(r"inequivalent arg '([\w-]+)'.* current is (?:the value )?'?([\w-]+)")


async def examine(wire: Wire, settings: RabbitSettings, topics: Sequence[str]) -> list[Finding]:
    """Ask the server by AMQP, and by its management API if the settings name it; judge."""
    seen = await _look(settings)
    names = list(dict.fromkeys(topics)) if settings.exchange == PER_TOPIC else [settings.exchange]
    states = {name: await _exchange(wire, name, seen) for name in names if name}
    found = [
        judging.encryption(settings),
        judging.credentials(settings),
        *judging.exchanges(states, settings),
        *[await _declared_queue(wire, queue) for queue, _ in settings.queues],
    ]
    if isinstance(seen, Topology):
        return [*found, ok("rabbitmq-management", "it answers"), *judging.topology(seen, settings, topics)]
    return [*found, seen]


async def _look(settings: RabbitSettings) -> Topology | Finding:
    if settings.management is None:
        return warn(
            "rabbitmq-management",
            "whether queues are bound, durable and unlimited, and whether publishers are blocked, cannot be known "
            "by AMQP alone",
            "name the management API: management=http://host:15672 in the broker's URL, or management beside its url",
        )
    client = Management(settings)
    try:
        return await asyncio.to_thread(client.topology)
    except Transient as error:
        text = f"the management API at {client.place} cannot be used ({error}), so nothing is known of the queues"
        return warn("rabbitmq-management", text, "check the address, and give the user the tag monitoring")


async def _exchange(wire: Wire, name: str, seen: Topology | Finding) -> State:
    if isinstance(seen, Topology):
        found = seen.exchanges.get(name)
        return State(found is not None, found is not None and found.durable, found is not None and found.temporary)
    if await _refusal(wire, commands.Exchange.Declare(exchange=name, passive=True)) is not None:
        return State(there=False)
    return await _durable(wire, name)


async def _durable(wire: Wire, name: str) -> State:
    """Declare an exchange as durable. It is there, so that changes nothing, and the server objects if it is not."""
    kind = "topic"
    for _ in range(KINDS_MAX):
        refused = await _refusal(wire, commands.Exchange.Declare(exchange=name, exchange_type=kind, durable=True))
        if refused is None:
            return State()
        differs = _DIFFERS.search(str(refused)) if refused.code == PRECONDITION else None
        if differs is None:
            break
        if differs[1] != "type":
            return State(durable=differs[1] != "durable", temporary=differs[1] == "auto_delete")
        kind = differs[2]
    return State(durable=None)


async def _declared_queue(wire: Wire, queue: str) -> Finding:
    """Look at a queue that the relay declares at its start: it must be absent, or be as it would be declared."""
    refused = await _refusal(wire, commands.Queue.Declare(queue=queue, passive=True))
    if refused is None:
        wanted = commands.Queue.Declare(queue=queue, durable=True, arguments=dict(QUORUM))
        refused = await _refusal(wire, wanted)
        return judging.declared_queue(queue, there=True, refusal=str(refused) if refused else "")
    return judging.declared_queue(queue, there=False, refusal="" if refused.code == NOT_FOUND else str(refused))


async def _refusal(wire: Wire, method: base.Frame) -> ChannelClosed | None:
    """Call a method on a channel of its own; return why the server closed it, None if it agreed."""
    number = await wire.open_channel()
    try:
        await wire.call(number, method)
    except ChannelClosed as error:
        return error
    wire.close_channel(number)
    return None
