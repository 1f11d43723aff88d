"""The settings of RabbitMQ, and their form in a URL.

    amqp://user:password@host:5672/vhost?exchange=shop&declare=billing:events.order.*,audit
    amqps://user:password@host/vhost?cafile=ca.pem

The default exchange name is `outrider`; `exchange=topic` means one exchange per topic, with the topic's name. The
routing key is the event's own, else its topic (else its key, if the exchange is the topic). `declare` creates the
exchange and quorum queues at start. Every queue is bound by the pattern after its colon (in a URL, write `%23` for
`#`); a queue without a pattern gets all messages. `cloudevents=/shop/orders` makes every message a CloudEvent from the
given source. `management=http://host:15672` is the address where `outrider doctor` asks about queues and bindings.
`connections_max=1` keeps a busy relay from opening more connections (at most four).
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from outrider.brokers.cloudevents import check_source
from outrider.errors import InvalidSetting
from outrider.event import Message

PER_TOPIC = "topic"
"""As the name of the exchange: one exchange per topic."""

EVERYTHING = "#"
ANSWERS = ("true", "false", "yes", "no", "on", "off", "1", "0")
DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}
OPTIONS = ("exchange", "declare", "cafile", "cloudevents", "management", "connections_max")
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""The default limit of RabbitMQ 4; older versions accept more."""

CONNECTIONS_MAX = 4
"""More connections brought no gain in measurements."""
CONNECTIONS_LIMIT = 64


@dataclass(frozen=True, slots=True)
class RabbitSettings:
    """The address of RabbitMQ, and the settings for publishing.

    `confirm_seconds` should be less than the relay's publish timeout, so that the confirms received in time are known.

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
            raise InvalidSetting("exchange=topic has no fixed exchange to declare; name one, or leave declare out")
        if self.cloudevents is not None:
            check_source(self.cloudevents)
        if self.management is not None:
            _check_management(self.management)
        for name in ("connect_seconds", "confirm_seconds", "heartbeat_seconds", "message_bytes_max"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(f"{name} = {getattr(self, name)} cannot work; it must be above 0")
        if type(self.connections_max) is not int or not 1 <= self.connections_max <= CONNECTIONS_LIMIT:
            raise InvalidSetting(f"connections_max cannot work; write a whole number from 1 to {CONNECTIONS_LIMIT}")
        if self.frame_bytes_max < 4096:
            raise InvalidSetting(f"frame_bytes_max = {self.frame_bytes_max} cannot work; AMQP needs at least 4096")

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RabbitSettings:
        """Read a URL; options override the URL. Error texts do not contain the password."""
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS:
            raise InvalidSetting(f"{parts.scheme}:// is not RabbitMQ; write amqp:// or amqps://")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(query.keys() - set(OPTIONS)):
            close = get_close_matches(unknown[0], OPTIONS, n=1)
            suggestion = f"; did you mean {close[0]}?" if close else ""
            raise InvalidSetting(
                f"unknown option {unknown[0]!r} in the RabbitMQ URL{suggestion} (valid: {', '.join(OPTIONS)})"
            )
        options_in_url = {
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
        return cls(**{**options_in_url, **options})

    @property
    def address(self) -> str:
        """Return the address of the server, for people."""
        return f"{self.host}:{self.port}"

    @property
    def make_exchange(self) -> str:
        """Return the remedy for a missing exchange, for the operator."""
        remedy = "declare the exchange (durable, type topic)"
        if self.exchange == PER_TOPIC:
            return remedy
        return f"{remedy}, or let the relay do so: add ?declare= and the names of queues to its URL"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context that checks the server's certificate, None without TLS."""
        return self.certificates() if self.tls else None

    def certificates(self) -> ssl.SSLContext:
        """Return a TLS context with the trusted certificates."""
        try:
            return ssl.create_default_context(cafile=self.cafile)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSetting(
                f"cafile {self.cafile!r} cannot be used ({error}); name a file of certificates"
            ) from error

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
    # The text may contain a password, so the error does not repeat the text.
    if not fine:
        raise InvalidSetting("management is no URL of RabbitMQ's management API; write http://host:15672")


def _count(text: str) -> int:
    """Read a number; invalid text becomes a number that the range check rejects."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(CONNECTIONS_LIMIT)) else 0


def _port(parts: SplitResult) -> int:
    try:
        return parts.port or DEFAULT_PORTS[parts.scheme]
    except ValueError:
        raise InvalidSetting("the RabbitMQ URL has a port that is no number from 1 to 65535") from None


def check_queues(queues: Iterable[tuple[str, str]]) -> None:
    """Reject queue names such as "true", which were meant as a yes or no to declaring queues.

    >>> check_queues([("billing", "events.order.*")])
    """
    for name, _ in queues:
        if name.lower() in ANSWERS:
            raise InvalidSetting(
                f"declare={name} in the RabbitMQ URL would make a queue named {name!r}; list queues, such as "
                "declare=billing:events.order.*,audit, write declare= for the exchange alone, or leave it out"
            )


def _queues(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (part.partition(":") for part in text.split(",") if part)
    return tuple((name, pattern or EVERYTHING) for name, _, pattern in pairs)
