"""The broker that needs no server: a durable log in a SQLite file."""

from outrider.brokers.embedded.broker import EmbeddedBroker
from outrider.brokers.embedded.log import Delivery

__all__ = ["Delivery", "EmbeddedBroker"]
