"""The broker that needs no server: a durable log in a SQLite file."""

from outrider.brokers.embedded.broker import EmbeddedBroker
from outrider.brokers.embedded.log import Entry
from outrider.brokers.embedded.source import EmbeddedSource

__all__ = ["EmbeddedBroker", "EmbeddedSource", "Entry"]
