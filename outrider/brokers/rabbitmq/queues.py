"""Inspects and declares queues.

AMQP cannot return the arguments of a queue. But the server rejects a declaration with different arguments, and names
the first difference; so the declaration is repeated with every value learned, until no difference is left. Policies
stay unknown, and without the right to configure the queue all arguments do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pamqp import base, commands

from outrider.brokers.rabbitmq.connection import AmqpConnection, ChannelClosed
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import UsageError

NOT_FOUND, PRECONDITION_FAILED = 404, 406

SINGLE_ACTIVE = "x-single-active-consumer"

DELIVERY_LIMIT, DEAD_LETTERS, QUEUE_TYPE = "x-delivery-limit", "x-dead-letter-exchange", "x-queue-type"

DEFAULT_LIMIT = 20
"""Default delivery limit of a quorum queue in RabbitMQ 4; earlier versions have no limit."""

LIMITS_SINCE = 4

# An argument that only a stream may have: an existing queue is compared, and no queue is created by accident.
GUARD = {"x-max-age": "1s"}

ROUNDS_MAX = 24

FLAGS = {"durable": True, "auto_delete": False}

_DIFFERENCE = re.compile(r"inequivalent arg '(?P<name>[^']+)' for queue ")

_CURRENT = re.compile(
    r".* but current is (?:(?P<none>none)|the value '(?P<value>.*)' of type '(?P<type>\w+)'|'(?P<same>.*)')$", re.DOTALL
)

_NONE, _SAME_TYPE = "none", "same"

_INTEGERS = ("byte", "short", "signedint", "long", "unsignedbyte", "unsignedshort", "unsignedint")

_BY_TYPE: dict[type, Callable[[str], Any]] = {bool: lambda text: text == "true", int: int, str: str}

_TYPES = {"longstr": _BY_TYPE[str], "bool": _BY_TYPE[bool], **dict.fromkeys(_INTEGERS, _BY_TYPE[int])}

log = logging.getLogger("outrider.rabbitmq")

QUORUM = {QUEUE_TYPE: "quorum"}

REORDERS_REMEDY = (
    "run one process, or empty the queue and declare it again with x-single-active-consumer=true (?declare= in the URL "
    "does); on_dead_letter=skip says that the order does not matter"
)

CONSUMER_ARGUMENTS = (SINGLE_ACTIVE, DELIVERY_LIMIT)
"""Arguments in which a queue may differ from the declaration: the consumer creates the queue first, with its own needs.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between a queue and its declaration. The type is empty if the server did not name it."""

    name: str
    text: str = ""
    type: str = ""

    def value(self, declared: Any) -> Any:
        """Return the value of the queue, None for none. A value without a type gets the type of `declared`."""
        read = _BY_TYPE.get(type(declared)) if self.type == _SAME_TYPE else _TYPES.get(self.type)
        return read(self.text) if read else None


@dataclass(slots=True)
class Queue:
    """The facts known about a queue.

    `mismatch` is the server's error text if the queue has no single active consumer; `unknown` is the server's error
    text if the inspection is incomplete.
    """

    name: str
    server_version: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=lambda: dict(FLAGS))
    mismatch: str = ""
    unknown: str = ""

    def learn(self, found: Difference) -> bool:
        """Record a difference; return False if the server reported nothing new, because another request would be
        useless.
        """
        table: dict[str, Any] = self.flags if found.name in FLAGS else self.arguments
        declared = table.get(found.name)
        value = found.value(declared)
        if value == declared or (value is None and found.type != _NONE):
            return False
        if value is None:
            del table[found.name]
        else:
            table[found.name] = value
        return True

    @property
    def delivery_limit(self) -> int | None:
        """Return the number of redeliveries that the queue allows, None for no limit."""
        default = DEFAULT_LIMIT if major(self.server_version) >= LIMITS_SINCE else -1
        limit = self.arguments.get(DELIVERY_LIMIT, default)
        return limit if self.arguments.get(QUEUE_TYPE) == "quorum" and limit >= 0 else None

    @property
    def reorders(self) -> bool:
        """Return whether the queue may deliver events of one key to several processes at once, as far as known."""
        return bool(self.mismatch) or (not self.unknown and not self.arguments.get(SINGLE_ACTIVE))

    @property
    def drops(self) -> bool:
        """Return whether the queue drops a message after too many deliveries, as far as known."""
        return not self.unknown and self.delivery_limit is not None and not self.arguments.get(DEAD_LETTERS)


def difference(text: str) -> Difference | None:
    """Parse the differing argument from the server's error text.

    >>> difference(
    ...     "inequivalent arg 'x-max-length' for queue 'a' in vhost '/': "
    ...     "received none but current is the value '5' of type 'long'"
    ... )
    Difference(name='x-max-length', text='5', type='long')
    """
    if (named := _DIFFERENCE.search(text)) is None:
        return None
    if (current := _CURRENT.match(text)) is None:
        return Difference(named["name"])
    if current["none"]:
        return Difference(named["name"], "", _NONE)
    if (same := current["same"]) is not None:
        return Difference(named["name"], same, _SAME_TYPE)
    return Difference(named["name"], current["value"], current["type"])


def major(version: str) -> int:
    """Return the first number of a version, 0 if there is none.

    >>> major("4.1.0"), major("")
    (4, 0)
    """
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def queue_arguments(server_version: str) -> dict[str, Any]:
    """Return the arguments for a queue of Outrider: replicated, a single active consumer, no delivery limit.

    The single active consumer keeps the order of a key when several processes consume. Before version 4 there is no
    limit by default, and a limit below zero would allow no redelivery at all.
    """
    arguments: dict[str, Any] = {QUEUE_TYPE: "quorum", SINGLE_ACTIVE: True}
    return arguments | ({DELIVERY_LIMIT: -1} if major(server_version) >= LIMITS_SINCE else {})


async def exists(connection: AmqpConnection, name: str) -> bool:
    """Return whether a queue exists; raise ChannelClosed if the server denies access."""
    number = await connection.open_channel()
    try:
        await connection.call(number, commands.Queue.Declare(queue=name, passive=True))
    except ChannelClosed as error:
        # A queue on a lost node is not found either, but will come back.
        if error.code == NOT_FOUND and "no queue" in str(error):
            return False
        raise
    connection.close_channel(number)
    return True


async def inspect(connection: AmqpConnection, name: str, guess: Queue | None = None) -> Queue:
    """Find the arguments with which a queue was declared. A good guess avoids rejections, which the server logs.

    The default guess is a queue declared by Outrider.
    """
    queue = Queue(name, connection.server_version, queue_arguments(connection.server_version))
    if guess is not None:
        queue.arguments, queue.flags = dict(guess.arguments), dict(guess.flags)
    for _ in range(ROUNDS_MAX):
        error_text = await _declare_error(connection, queue)
        if error_text is None or queue.arguments.get(QUEUE_TYPE) == "stream":
            return queue
        found = difference(error_text)
        if found is not None and found.name == SINGLE_ACTIVE and queue.arguments.get(SINGLE_ACTIVE):
            queue.mismatch = error_text
        if found is None or not queue.learn(found):
            queue.unknown = error_text
            return queue
    queue.unknown = f"it differs in more than {ROUNDS_MAX} ways"
    return queue


async def _declare_error(connection: AmqpConnection, queue: Queue) -> str | None:
    """Declare the queue with the known arguments; return the server's objection."""
    number = await connection.open_channel()
    arguments = {**GUARD, **queue.arguments}
    try:
        await connection.call(number, commands.Queue.Declare(queue=queue.name, **queue.flags, arguments=arguments))
    except ChannelClosed as error:
        return str(error)
    connection.close_channel(number)
    return None


async def ensure_queue(
    connection: AmqpConnection,
    settings: RabbitSettings,
    name: str,
    topics: Iterable[str],
    guess: Queue | None,
    *,
    exclusive: bool,
    keeps_order: bool,
) -> Queue:
    """Create the queue and bind the topics, if configured; check the queue, and return the known facts."""
    exists_already = await exists(connection, name)
    if not exists_already and not settings.declare:
        raise UsageError(
            f"RabbitMQ at {settings.address} has no queue {name!r}; create it, or add ?declare= to the URL"
        )
    if settings.declare:
        own = replace(settings, queues=tuple((name, topic) for topic in topics))
        methods = declarations(own, queue_arguments(connection.server_version))
        await apply(
            connection, settings, [m for m in methods if not (exists_already and isinstance(m, commands.Queue.Declare))]
        )
    known = guess if exists_already else None
    queue = await inspect(connection, name, known)
    check_queue(queue, exclusive=exclusive)
    if known is None:
        warn(queue, keeps_order=keeps_order)
    return queue


def check_queue(queue: Queue, *, exclusive: bool) -> None:
    """Raise UsageError for a queue that does not meet the needs of the consumer."""
    if queue.arguments.get(QUEUE_TYPE) == "stream":
        raise UsageError(
            f"{queue.name!r} is a stream: it does not remember what is acked; consume from a quorum queue instead"
        )
    if not exclusive:
        return
    if queue.mismatch:
        raise UsageError(
            f"the consumer of the queue {queue.name!r} has an ordering, so the queue must have a single active "
            f"consumer ({queue.mismatch}); set ordering=off, or stop the publishers of the queue, empty it first (set "
            "ordering=off, consume until idle), then delete it and declare it again with x-single-active-consumer=true "
            "(?declare= in the URL does)"
        )
    if queue.unknown:
        raise UsageError(
            f"the consumer of the queue {queue.name!r} has an ordering, so the queue must have a single active "
            f"consumer, and the server does not report it ({queue.unknown}); grant the right to configure the queue, "
            "or set ordering=off"
        )


def warn(queue: Queue, *, keeps_order: bool) -> None:
    """Log how the queue may lose messages, or their order: a warning if the consumer keeps the order of a key."""
    if queue.reorders:
        log.log(
            logging.WARNING if keeps_order else logging.INFO,
            "a queue may deliver events of one key to several processes at once, out of order",
            extra={"queue": queue.name, "remedy": REORDERS_REMEDY},
        )
    if queue.drops:
        log.warning(
            "a queue drops messages that are delivered too often",
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


async def declare(connection: AmqpConnection, settings: RabbitSettings) -> None:
    """Declare exchange, queues and bindings."""
    await apply(connection, settings, declarations(settings))


async def apply(connection: AmqpConnection, settings: RabbitSettings, methods: Iterable[base.Frame]) -> None:
    """Run the declarations on the server."""
    number = await connection.open_channel()
    for method in methods:
        try:
            await connection.call(number, method)
        except ChannelClosed as error:
            if (found := difference(str(error))) is None or found.name not in CONSUMER_ARGUMENTS:
                raise UsageError(
                    f"RabbitMQ at {settings.address} rejected the declaration ({error}); "
                    "remove what exists with other properties, grant the rights, or leave declare out"
                ) from error
            number = await connection.open_channel()
    connection.close_channel(number)


def declarations(settings: RabbitSettings, arguments: Mapping[str, Any] = QUORUM) -> list[base.Frame]:
    """List the declarations. The default exchange always exists, and every queue is bound to it.

    >>> [step.name for step in declarations(RabbitSettings(queues=(("audit", "#"),)))]
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
