"""The stores in a SQLite file, for one machine: any number of processes, no server."""

from outrider.stores.sqlite.inbox import SqliteInbox
from outrider.stores.sqlite.saga import SqliteSagas
from outrider.stores.sqlite.schema import SqliteSchema
from outrider.stores.sqlite.store import SqliteStore

__all__ = ["SqliteInbox", "SqliteSagas", "SqliteSchema", "SqliteStore"]
