"""Private, throw-away servers for tests and benchmarks, one file per kind."""

from outrider.testing.servers.kafka import KafkaCluster, KafkaServer, kafka_bootstrap
from outrider.testing.servers.postgres import PostgresServer, postgres_url
from outrider.testing.servers.rabbitmq import RabbitServer, rabbitmq_url
from outrider.testing.servers.server import Server, ServerError

__all__ = [
    "KafkaCluster",
    "KafkaServer",
    "PostgresServer",
    "RabbitServer",
    "Server",
    "ServerError",
    "kafka_bootstrap",
    "postgres_url",
    "rabbitmq_url",
]
