"""The stores in PostgreSQL: the outbox's, and the inbox's beside the data that handlers change."""

from outrider.stores.postgres.inbox import PostgresInbox
from outrider.stores.postgres.schema import PostgresSchema
from outrider.stores.postgres.store import PostgresStore

__all__ = ["PostgresInbox", "PostgresSchema", "PostgresStore"]
