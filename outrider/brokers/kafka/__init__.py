"""Apache Kafka, through librdkafka's idempotent producer and its consumer."""

from outrider.brokers.kafka.broker import KafkaBroker
from outrider.brokers.kafka.source import KafkaSource

__all__ = ["KafkaBroker", "KafkaSource"]
