"""Apache Kafka, through librdkafka's idempotent producer."""

from outrider.brokers.kafka.broker import KafkaBroker

__all__ = ["KafkaBroker"]
