"""What can be set about RabbitMQ, and how a URL says it.

    amqp://user:password@host:5672/vhost?exchange=shop&declare=billing:events.order.*,audit
    amqps://user:password@host/vhost?cafile=ca.pem

The exchange is `outrider` unless named; `exchange=topic` means one per topic, named like it. The routing key is the
event's own, else its topic (else its key, if the exchange is the topic). `declare` makes the exchange and quorum queues
at start, each bound by the pattern after its colon (in a URL, write `%23` for `#`); without one it takes everything.
`cloudevents=/shop/orders` makes every message a CloudEvent from that source. `management=http://host:15672` is where
`outrider doctor` asks about queues and bindings. `connections_max=1` keeps a relay with much to do from opening more
connections, up to four.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from outrider.brokers.cloudevents import check_source
from outrider.errors import BadSetting
from outrider.event import Message

PER_TOPIC = "topic"
"""As the name of the exchange: every topic has its own."""

EVERYTHING = "#"
ANSWERS = ("true", "false", "yes", "no", "on", "off", "1", "0")
DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}
OPTIONS = ("exchange", "declare", "cafile", "cloudevents", "management", "connections_max")
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""What RabbitMQ 4 takes unless told otherwise; older ones take more."""

CONNECTIONS_MAX = 4
"""More gained nothing more where it was measured."""
CONNECTIONS_LIMIT = 64


@dataclass(frozen=True, slots=True)
class RabbitSettings:
    """Where RabbitMQ is, and how to publish to it.

    `confirm_seconds` should be less than the relay's publish timeout, so that what was confirmed in time is known.

    >>> RabbitSettings.from_url("amqp://me:secret@mq/shop?declare=audit,billing:events.order.*").queues
    (('audit', '#'), ('billing', 'events.order.*'))
    """

    host: str = "localhost"
    port: int = 5672
    vhost: str = "/"
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    tls: bool = False
    cafile: str | None = None
    exchange: str = "outrider"
    queues: tuple[tuple[str, str], ...] = ()
    declare: bool = False
    cloudevents: str | None = None
    management: str | None = field(default=None, repr=False)
    connect_seconds: float = 4.0
    confirm_seconds: float = 4.0
    heartbeat_seconds: int = 10
    frame_bytes_max: int = 131_072
    message_bytes_max: int = MESSAGE_BYTES_MAX
    connections_max: int = CONNECTIONS_MAX

    def __post_init__(self) -> None:
        if self.declare and self.exchange == PER_TOPIC:
            raise BadSetting("exchange=topic has no fixed exchange to declare; name one, or leave declare out")
        if self.cloudevents is not None:
            check_source(self.cloudevents)
        if self.management is not None:
            _check_management(self.management)
        for name in ("connect_seconds", "confirm_seconds", "heartbeat_seconds", "message_bytes_max"):
            if getattr(self, name) <= 0:
                raise BadSetting(f"{name} = {getattr(self, name)} cannot work; it must be above 0")
        if type(self.connections_max) is not int or not 1 <= self.connections_max <= CONNECTIONS_LIMIT:
            raise BadSetting(f"connections_max cannot work; write a whole number from 1 to {CONNECTIONS_LIMIT}")
        if self.frame_bytes_max < 4096:
            raise BadSetting(f"frame_bytes_max = {self.frame_bytes_max} cannot work; AMQP needs at least 4096")

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RabbitSettings:
        """Read a URL; options win over it. What is wrong with it is said without its password."""
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS:
            raise BadSetting(f"{parts.scheme}:// is not RabbitMQ; write amqp:// or amqps://")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(query.keys() - set(OPTIONS)):
            near = get_close_matches(unknown[0], OPTIONS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadSetting(f"unknown option {unknown[0]!r} in the RabbitMQ URL{hint} (valid: {', '.join(OPTIONS)})")
        said = {
            "host": parts.hostname or "localhost",
            "port": _port(parts),
            "vhost": unquote(parts.path[1:]) or "/",
            "user": unquote(parts.username or "guest"),
            "password": unquote(parts.password if parts.password is not None else "guest"),
            "tls": parts.scheme == "amqps",
            "cafile": query.get("cafile"),
            "exchange": query.get("exchange", "outrider"),
            "queues": _queues(query.get("declare", "")),
            "declare": "declare" in query,
            "cloudevents": query.get("cloudevents"),
            "management": query.get("management"),
            "connections_max": _count(query.get("connections_max", str(CONNECTIONS_MAX))),
        }
        return cls(**{**said, **options})

    @property
    def place(self) -> str:
        """Name the server for people."""
        return f"{self.host}:{self.port}"

    @property
    def make_exchange(self) -> str:
        """Say what a person does about an exchange that is not there."""
        by_hand = "declare the exchange (durable, type topic)"
        if self.exchange == PER_TOPIC:
            return by_hand
        return f"{by_hand}, or let the relay do so: add ?declare= and the names of queues to its URL"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return how to check the server's certificate, None without TLS."""
        return self.certificates() if self.tls else None

    def certificates(self) -> ssl.SSLContext:
        """Return what to trust."""
        try:
            return ssl.create_default_context(cafile=self.cafile)
        except (OSError, ssl.SSLError) as error:
            raise BadSetting(f"cafile {self.cafile!r} cannot be used ({error}); name a file of certificates") from error

    def route(self, message: Message) -> tuple[str, str]:
        """Return the exchange and the routing key of a message.

        >>> RabbitSettings().route(Message("1", "orders", "A-1", None, b"", {}))
        ('outrider', 'orders')
        >>> RabbitSettings(exchange="topic").route(Message("1", "orders", "A-1", None, b"", {}))
        ('orders', 'A-1')
        """
        if self.exchange == PER_TOPIC:
            return message.topic, message.routing_key or message.key
        return self.exchange, message.routing_key or message.topic


def _check_management(url: str) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    # A password may be in there, so the text is not repeated.
    if not fine:
        raise BadSetting("management is no URL of RabbitMQ's management API; write http://host:15672")


def _count(text: str) -> int:
    """Read a number; what is none becomes one that is refused with the others that cannot work."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(CONNECTIONS_LIMIT)) else 0


def _port(parts: SplitResult) -> int:
    try:
        return parts.port or DEFAULT_PORTS[parts.scheme]
    except ValueError:
        raise BadSetting("the RabbitMQ URL has a port that is no number from 1 to 65535") from None


def check_queues(queues: Iterable[tuple[str, str]]) -> None:
    """Refuse queues that were meant as an answer to whether any should be declared.

    >>> check_queues([("billing", "events.order.*")])
    """
    for name, _ in queues:
        if name.lower() in ANSWERS:
            raise BadSetting(
                f"declare={name} in the RabbitMQ URL would make a queue named {name!r}; list queues, such as "
                "declare=billing:events.order.*,audit, write declare= for the exchange alone, or leave it out"
            )


def _queues(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (part.partition(":") for part in text.split(",") if part)
    return tuple((name, pattern or EVERYTHING) for name, _, pattern in pairs)
