"""Client of RabbitMQ's management API, for facts that AMQP hides: bindings and the limits of queues. Read-only."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import Transient

ANSWER_SECONDS_MAX = 10.0

ANSWER_BYTES_MAX = 64 * 1024 * 1024

PORTS = {"http": 15672, "https": 15671}

VOLATILE = ("auto_delete", "exclusive")


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue. `limits` are its arguments and policies under the names of the arguments, without `x-`."""

    name: str
    kind: str = "classic"
    durable: bool = True
    temporary: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange; messages without a matching binding go to the alternate exchange."""

    name: str
    kind: str = "topic"
    durable: bool = True
    temporary: bool = False
    alternate: str = ""


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from an exchange to a queue, or to another exchange."""

    source: str
    target: str
    to_queue: bool
    pattern: str


@dataclass(frozen=True, slots=True)
class Topology:
    """A virtual host. `alarms` names the nodes that block publishers, None if access is denied."""

    exchanges: Mapping[str, Exchange]
    queues: Mapping[str, QueueInfo]
    bindings: tuple[Binding, ...]
    nodes: int = 1
    alarms: tuple[str, ...] | None = ()


class Management:
    """A client of the API. The user is the user of the broker's URL, unless the management URL names another."""

    def __init__(self, settings: RabbitSettings) -> None:
        assert settings.management is not None
        parts = urlsplit(settings.management)
        self.address = f"{parts.hostname}:{parts.port or PORTS[parts.scheme]}"
        self._settings, self._parts = settings, parts
        user = unquote(parts.username) if parts.username else settings.user
        password = unquote(parts.password) if parts.password is not None else settings.password
        self._login = b64encode(f"{user}:{password}".encode()).decode()

    def topology(self) -> Topology:
        """Return the contents of the virtual host. Blocks; raises Transient."""
        vhost = quote(self._settings.vhost, safe="")
        exchanges = [_exchange(found) for found in self._get(f"exchanges/{vhost}")]
        queues = [_queue(found) for found in self._get(f"queues/{vhost}")]
        bindings = tuple(_binding(found) for found in self._get(f"bindings/{vhost}"))
        by_name = {exchange.name: exchange for exchange in exchanges}, {queue.name: queue for queue in queues}
        try:
            nodes = self._get("nodes")
        except Transient:  # Needs an additional user tag.
            return Topology(*by_name, bindings, alarms=None)
        alarmed = [node["name"] for node in nodes if node.get("mem_alarm") or node.get("disk_free_alarm")]
        return Topology(*by_name, bindings, len(nodes), tuple(alarmed))

    def _get(self, path: str) -> Any:
        connection = self._connection()
        try:
            target = f"{self._parts.path.rstrip('/')}/api/{path}"
            connection.request("GET", target, headers={"Authorization": f"Basic {self._login}"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise Transient(f"it answers {answer.status} {answer.reason}")
            return json.loads(answer.read(ANSWER_BYTES_MAX))
        except (OSError, HTTPException, ValueError) as error:
            raise Transient(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port or PORTS[self._parts.scheme]
        if self._parts.scheme == "https":
            context = self._settings.certificates()
            return HTTPSConnection(host, port, timeout=ANSWER_SECONDS_MAX, context=context)
        return HTTPConnection(host, port, timeout=ANSWER_SECONDS_MAX)


def _queue(found: Mapping[str, Any]) -> QueueInfo:
    given = {name.removeprefix("x-"): value for name, value in found.get("arguments", {}).items()}
    policy = found.get("effective_policy_definition") or {}
    kind = found.get("type") or given.get("queue-type", "classic")
    # If argument and policy both set a limit, the lower limit holds; otherwise the queue's own argument wins.
    limits = {**policy, **given}
    for name in policy.keys() & given.keys():
        if isinstance(policy[name], int) and isinstance(given[name], int):
            limits[name] = min(policy[name], given[name])
    return QueueInfo(found["name"], str(kind), found["durable"], any(found.get(name) for name in VOLATILE), limits)


def _exchange(found: Mapping[str, Any]) -> Exchange:
    alternate = found.get("arguments", {}).get("alternate-exchange", "")
    return Exchange(found["name"], found["type"], found["durable"], found["auto_delete"], alternate)


def _binding(found: Mapping[str, Any]) -> Binding:
    to_queue = found["destination_type"] == "queue"
    return Binding(found["source"], found["destination"], to_queue, found["routing_key"])


def reached(topology: Topology, exchange: str, routing_key: str | None) -> list[QueueInfo]:
    """Return the queues that a message reaches, also over other exchanges; without a routing key, all possible queues.

    >>> bound = Binding("shop", "audit", True, "order.*")
    >>> [queue.name for queue in reached(Topology({}, {"audit": QueueInfo("audit")}, (bound,)), "shop", "order.placed")]
    ['audit']
    """
    names: dict[str, None] = {}
    seen: set[str] = set()
    waiting = [exchange]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if not current:
            names |= dict.fromkeys([routing_key] if routing_key is not None else topology.queues)
            continue
        accepted = _taken(topology, current, routing_key)
        names |= {binding.target: None for binding in accepted if binding.to_queue}
        waiting += [binding.target for binding in accepted if not binding.to_queue]
        known = topology.exchanges.get(current)
        if not accepted and known is not None and known.alternate:
            waiting.append(known.alternate)
    return [topology.queues[name] for name in names if name in topology.queues]


def _taken(topology: Topology, exchange: str, routing_key: str | None) -> list[Binding]:
    known = topology.exchanges.get(exchange)
    kind = known.kind if known is not None else "topic"
    bindings = [binding for binding in topology.bindings if binding.source == exchange]
    if routing_key is None:
        return bindings
    return [binding for binding in bindings if takes(kind, binding.pattern, routing_key)]


def takes(kind: str, pattern: str, routing_key: str) -> bool:
    """Return whether a binding matches a routing key. Exchanges of other types count as a match.

    >>> takes("topic", "order.#", "order.placed.eu"), takes("topic", "order.*", "order.placed.eu")
    (True, False)
    """
    if kind == "topic":
        return _matches(pattern.split("."), routing_key.split("."))
    return pattern == routing_key if kind == "direct" else True


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Match words: `*` stands for one word, `#` for any number. Tracks the possible positions in the pattern."""
    places = _skipping(pattern, {0})
    for word in words:
        onward = {at + 1 for at in places if at < len(pattern) and pattern[at] in (word, "*")}
        places = _skipping(pattern, onward | {at for at in places if at < len(pattern) and pattern[at] == "#"})
    return len(pattern) in places


def _skipping(pattern: Sequence[str], places: set[int]) -> set[int]:
    found = set(places)
    for at in range(len(pattern)):
        if at in found and pattern[at] == "#":
            found.add(at + 1)
    return found
