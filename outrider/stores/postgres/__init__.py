"""The store in PostgreSQL."""

from outrider.stores.postgres.schema import PostgresSchema
from outrider.stores.postgres.store import PostgresStore

__all__ = ["PostgresSchema", "PostgresStore"]
