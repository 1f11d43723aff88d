"""What is good and bad about a RabbitMQ, from what was seen of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.brokers.rabbitmq.management import Queue, Topology
from outrider.brokers.rabbitmq.routing import reached
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings
from outrider.event import Message
from outrider.finding import Finding, ok, refuse, warn
from outrider.surroundings import is_loopback

CHECKS = {
    "rabbitmq-encryption": "nobody can listen in",
    "rabbitmq-credentials": "the password is not the one that everybody knows",
    "rabbitmq-exchange": "the exchange is there, and outlives a restart",
    "rabbitmq-declare": "queues that the relay declares are as it declares them",
    "rabbitmq-management": "queues and bindings can be seen",
    "rabbitmq-routes": "every topic reaches a durable queue",
    "rabbitmq-queues": "queues outlive a restart and their consumers",
    "rabbitmq-overflow": "a full queue refuses messages instead of dropping them",
    "rabbitmq-expiry": "messages wait for as long as it takes",
    "rabbitmq-replicas": "a queue survives the loss of a node",
    "rabbitmq-alarms": "no node blocks publishers",
}

NAME_TOPICS = "name them: --topic, or topics in the file"


@dataclass(frozen=True, slots=True)
class State:
    """How an exchange was found. `durable` is None if nobody would say."""

    there: bool = True
    durable: bool | None = True
    temporary: bool = False


def encryption(settings: RabbitSettings) -> Finding:
    """Judge who can read along.

    >>> encryption(RabbitSettings(host="mq.example")).level
    <Level.WARN: 'warn'>
    """
    if settings.tls:
        return ok("rabbitmq-encryption", "TLS")
    if is_loopback(settings.host):
        return ok("rabbitmq-encryption", "not encrypted, and on this machine only")
    return warn("rabbitmq-encryption", "password and events cross the network unencrypted", "use amqps://")


def credentials(settings: RabbitSettings) -> Finding:
    """Judge who else could log in.

    >>> credentials(RabbitSettings(host="mq.example")).level
    <Level.WARN: 'warn'>
    """
    if (settings.user, settings.password) != ("guest", "guest"):
        return ok("rabbitmq-credentials", f"user {settings.user}")
    if is_loopback(settings.host):
        return ok("rabbitmq-credentials", "guest, on this machine only")
    text = "guest with its well-known password may log in from elsewhere"
    return warn("rabbitmq-credentials", text, "make a user for the relay, and delete guest")


def exchanges(states: Mapping[str, State], settings: RabbitSettings) -> list[Finding]:
    """Judge the exchanges we publish to.

    >>> exchanges({}, RabbitSettings(exchange=""))[0].text
    'the one without a name is always there'
    """
    check = "rabbitmq-exchange"
    if not settings.exchange:
        return [ok(check, "the one without a name is always there")]
    if not states:
        return [warn(check, "every topic has its own, and no topic is known", NAME_TOPICS)]
    missing = [name for name, state in states.items() if not state.there]
    fleeting = [name for name, state in states.items() if state.there and (state.durable is False or state.temporary)]
    unknown = [name for name, state in states.items() if state.there and state.durable is None]
    found = []
    if missing and not settings.declare:
        remedy = "declare it (durable, type topic), or let the relay do so with declare= in the broker's URL"
        found.append(refuse(check, f"{', '.join(missing)}: not there; nothing can be published", remedy))
    if fleeting:
        text = f"{', '.join(fleeting)}: not durable or auto-delete; gone after a restart or with its last binding"
        found.append(warn(check, text, "delete it and declare it as durable, without auto-delete"))
    if unknown:
        text = f"{', '.join(unknown)}: there; whether it is durable may not be seen by this user"
        found.append(warn(check, text, "name the management API, or let the user configure the exchange"))
    if found:
        return found
    return [ok(check, "the relay makes it at its start" if missing else "there and durable")]


def declared_queue(queue: str, *, there: bool, refusal: str) -> Finding:
    """Judge a queue that the relay declares at its start.

    >>> declared_queue("audit", there=True, refusal="PRECONDITION_FAILED").level
    <Level.REFUSE: 'refuse'>
    """
    if refusal:
        remedy = "remove the queue so that it can be made as a durable quorum queue, or take it out of declare"
        return refuse("rabbitmq-declare", f"{queue}: a relay could not start ({refusal})", remedy)
    return ok("rabbitmq-declare", f"{queue}: {'as declared' if there else 'not there; the relay makes it'}")


def topology(seen: Topology, settings: RabbitSettings, topics: Sequence[str]) -> list[Finding]:
    """Judge where the topics go, and the queues behind the exchanges."""
    names = topics if settings.exchange == PER_TOPIC else [settings.exchange]
    routed = {topic: reached(seen, *route(settings, topic)) for topic in topics}
    behind = {queue.name: queue for name in names if name for queue in reached(seen, name, None)}
    behind |= {queue.name: queue for found in routed.values() for queue in found}
    queues = list(behind.values())
    return [
        routes(routed),
        lasting(queues),
        overflow(queues),
        expiry(queues),
        replicas(queues, seen.nodes),
        alarms(seen),
    ]


def route(settings: RabbitSettings, topic: str) -> tuple[str, str | None]:
    """Return the exchange and the routing key of a topic's messages; None where any routing key is possible.

    >>> route(RabbitSettings(exchange="shop"), "orders")
    ('shop', 'orders')
    """
    exchange, routing_key = settings.route(Message("", topic, "", None, b"", {}))
    # With an exchange per topic the routing key is the event's key, which could be any.
    return exchange, None if settings.exchange == PER_TOPIC else routing_key


def routes(routed: Mapping[str, Sequence[Queue]]) -> Finding:
    """Judge whether each topic has somewhere to go.

    >>> routes({"orders": []}).text
    'orders: no queue is bound for it, so its events would be buried'
    """
    check = "rabbitmq-routes"
    if not routed:
        return warn(check, "no topic was looked at: none is named, and none is staged", NAME_TOPICS)
    if lost := [topic for topic, queues in routed.items() if not queues]:
        text = f"{', '.join(lost)}: no queue is bound for it, so its events would be buried"
        return refuse(check, text, "bind a queue for it; events with a routing key of their own may have one already")
    if weak := [topic for topic, queues in routed.items() if not any(map(_lasts, queues))]:
        text = f"{', '.join(weak)}: reaches only queues that do not outlive a restart"
        return refuse(check, text, "bind a durable queue for it")
    return ok(check, f"{len(routed)} reach a durable queue")


def _lasts(queue: Queue) -> bool:
    return queue.durable and not queue.temporary


def lasting(queues: Iterable[Queue]) -> Finding:
    """Judge whether queues stay."""
    weak = [queue.name for queue in queues if not _lasts(queue)]
    if not weak:
        return ok("rabbitmq-queues", "all durable")
    text = f"{', '.join(weak)}: not durable, auto-delete or exclusive; confirmed messages go with the queue"
    return warn("rabbitmq-queues", text, "declare queues that matter as durable, best as quorum queues")


def overflow(queues: Iterable[Queue]) -> Finding:
    """Judge what a full queue does.

    >>> overflow([Queue("audit", limits={"max-length": 10})]).level
    <Level.REFUSE: 'refuse'>
    """
    # A stream keeps what it is told to keep, whether it was read or not; its limit is no overflow.
    limited = [
        queue
        for queue in queues
        if queue.kind != "stream" and not {"max-length", "max-length-bytes"}.isdisjoint(queue.limits)
    ]
    dropping = [queue.name for queue in limited if queue.limits.get("overflow", "drop-head") == "drop-head"]
    if not dropping:
        return ok("rabbitmq-overflow", "no queue drops messages")
    text = f"{', '.join(dropping)}: limited in length, and drops its oldest messages when full, though confirmed"
    return refuse("rabbitmq-overflow", text, "set overflow to reject-publish (argument x-overflow, or a policy)")


def expiry(queues: Iterable[Queue]) -> Finding:
    """Judge whether messages or queues go with time."""
    brief = [queue.name for queue in queues if not {"message-ttl", "expires"}.isdisjoint(queue.limits)]
    if not brief:
        return ok("rabbitmq-expiry", "messages do not expire")
    text = f"{', '.join(brief)}: messages, or the queue itself, expire; what no consumer took by then is gone"
    return warn("rabbitmq-expiry", text, "remove message-ttl and expires, or dead-letter what expires")


def replicas(queues: Iterable[Queue], nodes: int) -> Finding:
    """Judge what the loss of a node does."""
    single = [queue.name for queue in queues if queue.kind == "classic" and "ha-mode" not in queue.limits]
    if nodes == 1 or not single:
        return ok("rabbitmq-replicas", "one node" if nodes == 1 else "all replicated")
    text = f"{', '.join(single)}: classic, on one of {nodes} nodes; lost or away with it"
    return warn("rabbitmq-replicas", text, "use quorum queues")


def alarms(seen: Topology) -> Finding:
    """Judge whether publishers are blocked now."""
    if seen.alarms is None:
        return warn("rabbitmq-alarms", "the nodes may not be seen by this user", "give it the tag monitoring")
    if seen.alarms:
        text = f"{', '.join(seen.alarms)}: out of memory or disk, and blocks publishers now; relays wait"
        return warn("rabbitmq-alarms", text, "free memory or disk, or let consumers catch up")
    return ok("rabbitmq-alarms", "none")
