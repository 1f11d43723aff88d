"""RabbitMQ: a pipelined publisher with confirms, and a source, on pamqp's codec."""

from outrider.brokers.rabbitmq.broker import RabbitBroker
from outrider.brokers.rabbitmq.consumer import RabbitSource
from outrider.brokers.rabbitmq.settings import PER_TOPIC, RabbitSettings

__all__ = ["PER_TOPIC", "RabbitBroker", "RabbitSettings", "RabbitSource"]
