"""Checks of RabbitMQ: do messages reach a queue, and does the queue keep the messages?

AMQP reveals little: whether an exchange exists and, by a repeated declaration, whether the exchange is durable. All
facts about queues and bindings need the management API; without the API, the check result says so.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pamqp import base, commands

from outrider.brokers.rabbitmq.connection import AmqpConnection, ChannelClosed, connect
from outrider.brokers.rabbitmq.management import Management, QueueInfo, Topology, reached
from outrider.brokers.rabbitmq.queues import QUORUM, REORDERS_REMEDY, Queue, check_queue, exists, inspect
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings
from outrider.checks import CheckResult, Level, fail, is_loopback, ok, warn
from outrider.errors import Transient, UsageError
from outrider.event import Message

NOT_FOUND, PRECONDITION = 404, 406

KINDS_MAX = 3

_DIFFERS = re.compile(r"inequivalent arg '([\w-]+)'.* current is (?:the value )?'?([\w-]+)")

CHECKS = {
    "rabbitmq-encryption": "the connection is encrypted",
    "rabbitmq-credentials": "the password is not the default",
    "rabbitmq-exchange": "the exchange is there, and outlives a restart",
    "rabbitmq-declare": "queues that the relay declares are as it declares them",
    "rabbitmq-management": "queues and bindings can be seen",
    "rabbitmq-routes": "every topic reaches a durable queue",
    "rabbitmq-queues": "queues outlive a restart and their consumers",
    "rabbitmq-overflow": "a full queue rejects messages instead of dropping them",
    "rabbitmq-expiry": "messages wait for as long as it takes",
    "rabbitmq-replicas": "a queue survives the loss of a node",
    "rabbitmq-alarms": "no node blocks publishers",
    "rabbitmq-consumer": "a consumer's queue is there, fit for it, and bound to its topics",
}

NAME_TOPICS = "name them: --topic, or topics in the file"


CHECK = "rabbitmq-consumer"


def credentials(settings: RabbitSettings) -> CheckResult:
    """Return whether the login uses the default password, as a check result.

    >>> credentials(RabbitSettings(host="mq.example")).level
    <Level.WARN: 'warn'>
    """
    if (settings.user, settings.password) != ("guest", "guest"):
        return ok("rabbitmq-credentials", f"user {settings.user}")
    if is_loopback(settings.host):
        return ok("rabbitmq-credentials", "guest, on this machine only")
    text = "guest with its well-known password may log in from elsewhere"
    return warn("rabbitmq-credentials", text, "make a user for the relay, and delete guest")


def encryption(settings: RabbitSettings) -> CheckResult:
    """Return whether the connection is encrypted, as a check result.

    >>> encryption(RabbitSettings(host="mq.example")).level
    <Level.WARN: 'warn'>
    """
    if settings.tls:
        return ok("rabbitmq-encryption", "TLS")
    if is_loopback(settings.host):
        return ok("rabbitmq-encryption", "not encrypted, and on this machine only")
    return warn("rabbitmq-encryption", "password and events cross the network unencrypted", "use amqps://")


def exchanges(states: Mapping[str, BrokerState], settings: RabbitSettings) -> list[CheckResult]:
    """Return the check results for the exchanges of the relay.

    >>> exchanges({}, RabbitSettings(exchange=""))[0].text
    'the one without a name is always there'
    """
    check = "rabbitmq-exchange"
    if not settings.exchange:
        return [ok(check, "the one without a name is always there")]
    if not states:
        return [warn(check, "every topic has its own, and no topic is known", NAME_TOPICS)]
    missing = [name for name, state in states.items() if not state.exists]
    temporary = [name for name, state in states.items() if state.exists and (state.durable is False or state.temporary)]
    unknown = [name for name, state in states.items() if state.exists and state.durable is None]
    found = []
    if missing and not settings.declare:
        remedy = "declare it (durable, type topic), or let the relay do so with declare= in the broker's URL"
        found.append(fail(check, f"{', '.join(missing)}: not there; nothing can be published", remedy))
    if temporary:
        text = f"{', '.join(temporary)}: not durable or auto-delete; gone after a restart or with its last binding"
        found.append(warn(check, text, "delete it and declare it as durable, without auto-delete"))
    if unknown:
        text = f"{', '.join(unknown)}: there; whether it is durable may not be seen by this user"
        found.append(warn(check, text, "name the management API, or let the user configure the exchange"))
    if found:
        return found
    return [ok(check, "the relay makes it at its start" if missing else "there and durable")]


def topology(server: Topology, settings: RabbitSettings, topics: Sequence[str]) -> list[CheckResult]:
    """Return the check results for the routes of the topics, and for the queues behind the exchanges."""
    names = topics if settings.exchange == PER_TOPIC else [settings.exchange]
    routed = {topic: reached(server, *route(settings, topic)) for topic in topics}
    by_name = {queue.name: queue for name in names if name for queue in reached(server, name, None)}
    by_name |= {queue.name: queue for found in routed.values() for queue in found}
    queues = list(by_name.values())
    return [
        routes(routed),
        durability(queues),
        overflow(queues),
        expiry(queues),
        replicas(queues, server.nodes),
        alarms(server),
    ]


async def check(connection: AmqpConnection, settings: RabbitSettings, topics: Sequence[str]) -> list[CheckResult]:
    """Ask the server over AMQP, and over the management API if configured; return check results."""
    server = await _read_topology(settings)
    names = list(dict.fromkeys(topics)) if settings.exchange == PER_TOPIC else [settings.exchange]
    states = {name: await _exchange(connection, name, server) for name in names if name}
    found = [
        encryption(settings),
        credentials(settings),
        *exchanges(states, settings),
        *[await _declared_queue(connection, queue) for queue, _ in settings.queues],
    ]
    if isinstance(server, Topology):
        return [*found, ok("rabbitmq-management", "it answers"), *topology(server, settings, topics)]
    return [*found, server]


async def _read_topology(settings: RabbitSettings) -> Topology | CheckResult:
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
        text = f"the management API at {client.address} cannot be used ({error}), so nothing is known of the queues"
        return warn("rabbitmq-management", text, "check the address, and give the user the tag monitoring")


async def _exchange(connection: AmqpConnection, name: str, server: Topology | CheckResult) -> BrokerState:
    if isinstance(server, Topology):
        found = server.exchanges.get(name)
        return BrokerState(
            found is not None, found is not None and found.durable, found is not None and found.temporary
        )
    if await _declare_error(connection, commands.Exchange.Declare(exchange=name, passive=True)) is not None:
        return BrokerState(exists=False)
    return await _durable(connection, name)


async def _durable(connection: AmqpConnection, name: str) -> BrokerState:
    """Declare an existing exchange as durable: no change, but the server objects if the exchange is not durable."""
    kind = "topic"
    for _ in range(KINDS_MAX):
        error = await _declare_error(
            connection, commands.Exchange.Declare(exchange=name, exchange_type=kind, durable=True)
        )
        if error is None:
            return BrokerState()
        differs = _DIFFERS.search(str(error)) if error.code == PRECONDITION else None
        if differs is None:
            break
        if differs[1] != "type":
            return BrokerState(durable=differs[1] != "durable", temporary=differs[1] == "auto_delete")
        kind = differs[2]
    return BrokerState(durable=None)


def declared_queue(queue: str, *, exists: bool, error: str) -> CheckResult:
    """Return the check result for a queue that the relay declares at its start.

    >>> declared_queue("audit", exists=True, error="PRECONDITION_FAILED").level
    <Level.ERROR: 'error'>
    """
    if error:
        remedy = "remove the queue so that it can be made as a durable quorum queue, or take it out of declare"
        return fail("rabbitmq-declare", f"{queue}: a relay could not start ({error})", remedy)
    return ok("rabbitmq-declare", f"{queue}: {'as declared' if exists else 'not there; the relay makes it'}")


async def _declared_queue(connection: AmqpConnection, queue: str) -> CheckResult:
    """Check a queue that the relay declares at its start: missing, or already declared in the same way."""
    error = await _declare_error(connection, commands.Queue.Declare(queue=queue, passive=True))
    if error is None:
        wanted = commands.Queue.Declare(queue=queue, durable=True, arguments=dict(QUORUM))
        error = await _declare_error(connection, wanted)
        return declared_queue(queue, exists=True, error=str(error) if error else "")
    return declared_queue(queue, exists=False, error="" if error.code == NOT_FOUND else str(error))


async def _declare_error(connection: AmqpConnection, method: base.Frame) -> ChannelClosed | None:
    """Call a method on a new channel; return the error with which the server closed the channel, None on success."""
    number = await connection.open_channel()
    try:
        await connection.call(number, method)
    except ChannelClosed as error:
        return error
    connection.close_channel(number)
    return None


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The state of an exchange. `durable` is None if unknown."""

    exists: bool = True
    durable: bool | None = True
    temporary: bool = False


def route(settings: RabbitSettings, topic: str) -> tuple[str, str | None]:
    """Return the exchange and the routing key of a topic's messages; None where any routing key is possible.

    >>> route(RabbitSettings(exchange="shop"), "orders")
    ('shop', 'orders')
    """
    exchange, routing_key = settings.route(Message("", topic, "", None, b"", {}))
    # With an exchange per topic, the routing key is the key of the event and can have any value.
    return exchange, None if settings.exchange == PER_TOPIC else routing_key


def routes(routed: Mapping[str, Sequence[QueueInfo]]) -> CheckResult:
    """Return whether every topic reaches a queue, as a check result.

    >>> routes({"orders": []}).text
    'orders: no queue is bound for it, so its events would be dead-lettered'
    """
    check = "rabbitmq-routes"
    if not routed:
        return warn(check, "no topic was looked at: none is named, and none is staged", NAME_TOPICS)
    if unrouted := [topic for topic, queues in routed.items() if not queues]:
        text = f"{', '.join(unrouted)}: no queue is bound for it, so its events would be dead-lettered"
        return fail(check, text, "bind a queue for it; events with a routing key of their own may have one already")
    if weak := [topic for topic, queues in routed.items() if not any(map(_is_durable, queues))]:
        text = f"{', '.join(weak)}: reaches only queues that do not outlive a restart"
        return fail(check, text, "bind a durable queue for it")
    return ok(check, f"{len(routed)} reach a durable queue")


def _is_durable(queue: QueueInfo) -> bool:
    return queue.durable and not queue.temporary


def durability(queues: Iterable[QueueInfo]) -> CheckResult:
    """Return whether the queues survive a restart and a disconnect, as a check result."""
    weak = [queue.name for queue in queues if not _is_durable(queue)]
    if not weak:
        return ok("rabbitmq-queues", "all durable")
    text = f"{', '.join(weak)}: not durable, auto-delete or exclusive; confirmed messages go with the queue"
    return warn("rabbitmq-queues", text, "declare queues that matter as durable, best as quorum queues")


def overflow(queues: Iterable[QueueInfo]) -> CheckResult:
    """Return whether a full queue rejects or drops messages, as a check result.

    >>> overflow([QueueInfo("audit", limits={"max-length": 10})]).level
    <Level.ERROR: 'error'>
    """
    # A stream keeps messages by its retention, read or not; the limit of a stream is no overflow.
    limited = [
        queue
        for queue in queues
        if queue.kind != "stream" and not {"max-length", "max-length-bytes"}.isdisjoint(queue.limits)
    ]
    dropping = [queue.name for queue in limited if queue.limits.get("overflow", "drop-head") == "drop-head"]
    if not dropping:
        return ok("rabbitmq-overflow", "no queue drops messages")
    text = f"{', '.join(dropping)}: limited in length, and drops its oldest messages when full, though confirmed"
    return fail("rabbitmq-overflow", text, "set overflow to reject-publish (argument x-overflow, or a policy)")


def expiry(queues: Iterable[QueueInfo]) -> CheckResult:
    """Return whether messages or queues expire, as a check result."""
    expiring = [queue.name for queue in queues if not {"message-ttl", "expires"}.isdisjoint(queue.limits)]
    if not expiring:
        return ok("rabbitmq-expiry", "messages do not expire")
    text = f"{', '.join(expiring)}: messages, or the queue itself, expire; what no consumer took by then is gone"
    return warn("rabbitmq-expiry", text, "remove message-ttl and expires, or dead-letter what expires")


def replicas(queues: Iterable[QueueInfo], nodes: int) -> CheckResult:
    """Return whether the queues survive the loss of a node, as a check result."""
    single = [queue.name for queue in queues if queue.kind == "classic" and "ha-mode" not in queue.limits]
    if nodes == 1 or not single:
        return ok("rabbitmq-replicas", "one node" if nodes == 1 else "all replicated")
    text = f"{', '.join(single)}: classic, on one of {nodes} nodes; lost or away with it"
    return warn("rabbitmq-replicas", text, "use quorum queues")


def alarms(server: Topology) -> CheckResult:
    """Return whether the server blocks publishers now, as a check result."""
    if server.alarms is None:
        return warn("rabbitmq-alarms", "the nodes may not be seen by this user", "give it the tag monitoring")
    if server.alarms:
        text = f"{', '.join(server.alarms)}: out of memory or disk, and blocks publishers now; relays wait"
        return warn("rabbitmq-alarms", text, "free memory or disk, or let consumers catch up")
    return ok("rabbitmq-alarms", "none")


async def check_source_queue(
    settings: RabbitSettings, name: str, topics: Sequence[str], *, exclusive: bool, keeps_order: bool
) -> CheckResult:
    """Check a queue over AMQP, and the bindings over the management API if configured."""
    connection = await connect(settings)
    try:
        queue = await _inspect(connection, settings, name, exclusive=exclusive)
    finally:
        await connection.close()
    if isinstance(queue, CheckResult):
        return queue
    if settings.declare:
        found = ok(CHECK, f"{name}: the consumer makes it and binds it at its start, where need be")
    else:
        found = check_bindings(await _topology(settings), settings, name, topics)
    if keeps_order and queue is not None and queue.reorders and found.level is Level.OK:
        text = f"{name}: may deliver events of one key to several processes at once, out of order"
        return warn(CHECK, text, REORDERS_REMEDY)
    return found


async def _inspect(
    connection: AmqpConnection, settings: RabbitSettings, name: str, *, exclusive: bool
) -> Queue | CheckResult | None:
    """Return the queue, None if the consumer will make it, or a check result if the consumer could not start."""
    try:
        if not await exists(connection, name):
            remedy = "make it and bind it, or let the consumer do so: add ?declare= to the broker's URL"
            return None if settings.declare else fail(CHECK, f"{name}: there is no such queue", remedy)
        queue = await inspect(connection, name)
        check_queue(queue, exclusive=exclusive)
    except ChannelClosed as error:
        remedy = "grant the user the right to configure and to read it"
        return fail(CHECK, f"{name}: the server does not say how it is ({error})", remedy)
    except UsageError as error:
        text, _, remedy = str(error).rpartition("; ")
        return fail(CHECK, text, remedy)
    return queue


async def _topology(settings: RabbitSettings) -> Topology | None:
    """Return the topology with the bindings, or None. Another check result reports that the bindings are hidden."""
    if settings.management is None:
        return None
    try:
        return await asyncio.to_thread(Management(settings).topology)
    except Transient:
        return None


def check_bindings(server: Topology | None, settings: RabbitSettings, name: str, topics: Sequence[str]) -> CheckResult:
    """Return whether a consumer's topics reach its queue, as a check result.

    >>> check_bindings(Topology({}, {}, ()), RabbitSettings(exchange="shop"), "billing", ["orders"]).text
    'billing: nothing that is published to orders reaches it'
    """
    if server is None:
        return ok(CHECK, f"{name}: there; its bindings cannot be seen by AMQP alone")
    unreached = [t for t in topics if name not in [queue.name for queue in reached(server, *route(settings, t))]]
    if not unreached:
        return ok(CHECK, f"{name}: there, and bound to its topics")
    text = f"{name}: nothing that is published to {', '.join(unreached)} reaches it"
    return fail(CHECK, text, f"bind it to the exchange {settings.exchange!r}, or add ?declare= to the broker's URL")
