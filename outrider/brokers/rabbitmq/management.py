"""RabbitMQ's management API: what AMQP does not tell, such as bindings and the limits of queues. Reads only."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
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
class Queue:
    """A queue. `limits` are its arguments and policies under the names of the arguments, without their `x-`."""

    name: str
    kind: str = "classic"
    durable: bool = True
    temporary: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange; what no binding takes goes to the alternate one."""

    name: str
    kind: str = "topic"
    durable: bool = True
    temporary: bool = False
    alternate: str = ""


@dataclass(frozen=True, slots=True)
class Binding:
    """What goes from an exchange to a queue, or to another exchange."""

    source: str
    target: str
    to_queue: bool
    pattern: str


@dataclass(frozen=True, slots=True)
class Topology:
    """One virtual host. `alarms` names nodes that block publishers, None if that may not be seen."""

    exchanges: Mapping[str, Exchange]
    queues: Mapping[str, Queue]
    bindings: tuple[Binding, ...]
    nodes: int = 1
    alarms: tuple[str, ...] | None = ()


class Management:
    """A client of the API, with the user of the broker's URL unless its own URL names another."""

    def __init__(self, settings: RabbitSettings) -> None:
        assert settings.management is not None
        parts = urlsplit(settings.management)
        self.place = f"{parts.hostname}:{parts.port or PORTS[parts.scheme]}"
        self._settings, self._parts = settings, parts
        user = unquote(parts.username) if parts.username else settings.user
        password = unquote(parts.password) if parts.password is not None else settings.password
        self._login = b64encode(f"{user}:{password}".encode()).decode()

    def topology(self) -> Topology:
        """Return all that there is in the virtual host. Blocks; raises Transient."""
        vhost = quote(self._settings.vhost, safe="")
        exchanges = [_exchange(found) for found in self._get(f"exchanges/{vhost}")]
        queues = [_queue(found) for found in self._get(f"queues/{vhost}")]
        bindings = tuple(_binding(found) for found in self._get(f"bindings/{vhost}"))
        by_name = {exchange.name: exchange for exchange in exchanges}, {queue.name: queue for queue in queues}
        try:
            nodes = self._get("nodes")
        except Transient:  # Needs a tag more than the rest does.
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


def _queue(found: Mapping[str, Any]) -> Queue:
    given = {name.removeprefix("x-"): value for name, value in found.get("arguments", {}).items()}
    policy = found.get("effective_policy_definition") or {}
    kind = found.get("type") or given.get("queue-type", "classic")
    # Where both set a limit the lower one holds; for the rest the queue's own argument wins.
    limits = {**policy, **given}
    for name in policy.keys() & given.keys():
        if isinstance(policy[name], int) and isinstance(given[name], int):
            limits[name] = min(policy[name], given[name])
    return Queue(found["name"], str(kind), found["durable"], any(found.get(name) for name in VOLATILE), limits)


def _exchange(found: Mapping[str, Any]) -> Exchange:
    alternate = found.get("arguments", {}).get("alternate-exchange", "")
    return Exchange(found["name"], found["type"], found["durable"], found["auto_delete"], alternate)


def _binding(found: Mapping[str, Any]) -> Binding:
    to_queue = found["destination_type"] == "queue"
    return Binding(found["source"], found["destination"], to_queue, found["routing_key"])
