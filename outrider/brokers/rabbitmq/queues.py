"""What a queue is like, and making one.

AMQP has no way to ask how a queue was declared. But the server refuses to declare it otherwise, and names one
difference at a time; so it is asked again and again, each time with what it has just told, until nothing differs.
Policies are not told about, and without the right to configure the queue nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pamqp import commands

from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire

NOT_FOUND, PRECONDITION_FAILED = 404, 406
SINGLE_ACTIVE = "x-single-active-consumer"
DELIVERY_LIMIT, DEAD_LETTERS, QUEUE_TYPE = "x-delivery-limit", "x-dead-letter-exchange", "x-queue-type"
DEFAULT_LIMIT = 20
"""How often RabbitMQ 4 delivers a message of a quorum queue that says nothing about it; earlier ones have no limit."""
LIMITS_SINCE = 4

# An argument that only a stream may have. It lets an existing queue be compared, and no queue be made by accident.
GUARD = {"x-max-age": "1s"}
ROUNDS_MAX = 24
FLAGS = {"durable": True, "auto_delete": False}

_DIFFERENCE = re.compile(r"inequivalent arg '(?P<name>[^']+)' for queue ")
_CURRENT = re.compile(
    r".* but current is (?:(?P<none>none)|the value '(?P<value>.*)' of type '(?P<type>\w+)'|'(?P<same>.*)')$", re.DOTALL
)
_NONE, _SAME = "none", "same"
_INTEGERS = ("byte", "short", "signedint", "long", "unsignedbyte", "unsignedshort", "unsignedint")
_LIKE: dict[type, Callable[[str], Any]] = {bool: lambda text: text == "true", int: int, str: str}
_TYPES = {"longstr": _LIKE[str], "bool": _LIKE[bool], **dict.fromkeys(_INTEGERS, _LIKE[int])}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a queue is not what was asked for. The type is empty if the server did not say what it is."""

    name: str
    text: str = ""
    type: str = ""

    def value(self, asked: Any) -> Any:
        """Return what the queue has, None for nothing. The type is not told if what was asked for is of the same."""
        read = _LIKE.get(type(asked)) if self.type == _SAME else _TYPES.get(self.type)
        return read(self.text) if read else None


@dataclass(slots=True)
class Queue:
    """What was found out about a queue.

    `objection` is the server's word for it that the queue has not one active consumer; `unknown` is its word where it
    did not tell everything.
    """

    name: str
    server_version: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=lambda: dict(FLAGS))
    objection: str = ""
    unknown: str = ""

    def learn(self, found: Difference) -> bool:
        """Note what the server told; if that says nothing new, asking again would lead nowhere."""
        table: dict[str, Any] = self.flags if found.name in FLAGS else self.arguments
        asked = table.get(found.name)
        value = found.value(asked)
        if value == asked or (value is None and found.type != _NONE):
            return False
        if value is None:
            del table[found.name]
        else:
            table[found.name] = value
        return True

    @property
    def delivery_limit(self) -> int | None:
        """Return how often a message may come again, None for ever."""
        default = DEFAULT_LIMIT if major(self.server_version) >= LIMITS_SINCE else -1
        limit = self.arguments.get(DELIVERY_LIMIT, default)
        return limit if self.arguments.get(QUEUE_TYPE) == "quorum" and limit >= 0 else None

    @property
    def drops(self) -> bool:
        """Tell whether a message that came too often is lost, as far as is known."""
        return not self.unknown and self.delivery_limit is not None and not self.arguments.get(DEAD_LETTERS)


def difference(text: str) -> Difference | None:
    """Read in which argument a queue differs, from the server's refusal.

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
        return Difference(named["name"], same, _SAME)
    return Difference(named["name"], current["value"], current["type"])


def major(version: str) -> int:
    """Return the first number of a version, 0 if there is none.

    >>> major("4.1.0"), major("")
    (4, 0)
    """
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def queue_arguments(server_version: str) -> dict[str, Any]:
    """Return how a queue of ours is declared: replicated, one active consumer, and nothing is lost by counting.

    One active consumer at a time is what keeps the order of a key when several processes consume. Before version 4 a
    limit below zero would mean none at all, and there is no limit unless one is set.
    """
    arguments: dict[str, Any] = {QUEUE_TYPE: "quorum", SINGLE_ACTIVE: True}
    return arguments | ({DELIVERY_LIMIT: -1} if major(server_version) >= LIMITS_SINCE else {})


async def exists(wire: Wire, name: str) -> bool:
    """Tell whether a queue is there; raises ChannelClosed if the server will not tell."""
    number = await wire.open_channel()
    try:
        await wire.call(number, commands.Queue.Declare(queue=name, passive=True))
    except ChannelClosed as error:
        # A queue whose node is away is not found either, but it will be back.
        if error.code == NOT_FOUND and "no queue" in str(error):
            return False
        raise
    wire.close_channel(number)
    return True


async def inspect(wire: Wire, name: str, guess: Queue | None = None) -> Queue:
    """Find out how a queue was declared. A good guess spares the server refusals, and its log: it notes each of them.

    Without a guess it is expected to be a queue of ours.
    """
    queue = Queue(name, wire.server_version, queue_arguments(wire.server_version))
    if guess is not None:
        queue.arguments, queue.flags = dict(guess.arguments), dict(guess.flags)
    for _ in range(ROUNDS_MAX):
        refusal = await _ask(wire, queue)
        if refusal is None or queue.arguments.get(QUEUE_TYPE) == "stream":
            return queue
        found = difference(refusal)
        if found is not None and found.name == SINGLE_ACTIVE and queue.arguments.get(SINGLE_ACTIVE):
            queue.objection = refusal
        if found is None or not queue.learn(found):
            queue.unknown = refusal
            return queue
    queue.unknown = f"it differs in more than {ROUNDS_MAX} ways"
    return queue


async def _ask(wire: Wire, queue: Queue) -> str | None:
    """Declare the queue as far as it is known; return the server's objection to that."""
    number = await wire.open_channel()
    arguments = {**GUARD, **queue.arguments}
    try:
        await wire.call(number, commands.Queue.Declare(queue=queue.name, **queue.flags, arguments=arguments))
    except ChannelClosed as error:
        return str(error)
    wire.close_channel(number)
    return None
