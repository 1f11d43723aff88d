"""Apache Kafka, with the idempotent producer and the consumer of librdkafka."""

from outrider.brokers.kafka.broker import KafkaBroker
from outrider.brokers.kafka.consumer import KafkaSource

__all__ = ["KafkaBroker", "KafkaSource"]
