"""Private, throw-away servers for tests and benchmarks, one file per kind."""

from outrider.testing.servers.postgres import PostgresServer, postgres_url
from outrider.testing.servers.server import Server, ServerError

__all__ = ["PostgresServer", "Server", "ServerError", "postgres_url"]
