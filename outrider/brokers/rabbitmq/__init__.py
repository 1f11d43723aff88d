"""RabbitMQ: a pipelined publisher with confirms, and a source, on pamqp's codec."""

from outrider.brokers.rabbitmq.broker import RabbitBroker
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings
from outrider.brokers.rabbitmq.source import RabbitSource

__all__ = ["PER_TOPIC", "RabbitBroker", "RabbitSettings", "RabbitSource"]
