"""Private, throw-away servers for tests and benchmarks, a file per server."""

from outrider.testing.servers.kafka import KafkaCluster, KafkaServer, kafka_bootstrap
from outrider.testing.servers.mongo import MongoServer, mongo_url
from outrider.testing.servers.postgres import PgBouncer, PostgresServer, pgbouncer_url, postgres_url
from outrider.testing.servers.rabbitmq import RabbitServer, rabbitmq_url
from outrider.testing.servers.server import Server, ServerError, ServerMissing, keep_logs, kept_logs

__all__ = [
    "KafkaCluster",
    "KafkaServer",
    "MongoServer",
    "PgBouncer",
    "PostgresServer",
    "RabbitServer",
    "Server",
    "ServerError",
    "ServerMissing",
    "kafka_bootstrap",
    "keep_logs",
    "kept_logs",
    "mongo_url",
    "pgbouncer_url",
    "postgres_url",
    "rabbitmq_url",
]
