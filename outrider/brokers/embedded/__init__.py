"""A broker without a server: a durable log in a SQLite file."""

from outrider.brokers.embedded.broker import EmbeddedBroker
from outrider.brokers.embedded.consumer import EmbeddedSource
from outrider.brokers.embedded.log import LogEntry

__all__ = ["EmbeddedBroker", "EmbeddedSource", "LogEntry"]
