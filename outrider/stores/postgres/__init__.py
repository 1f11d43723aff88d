"""The stores in PostgreSQL: the outbox's, and those of inbox and sagas beside the data that their code changes."""

from outrider.stores.postgres.inbox import PostgresInbox
from outrider.stores.postgres.saga import PostgresSagas
from outrider.stores.postgres.schema import PostgresSchema
from outrider.stores.postgres.store import PostgresStore

__all__ = ["PostgresInbox", "PostgresSagas", "PostgresSchema", "PostgresStore"]
