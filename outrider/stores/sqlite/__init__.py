"""The stores in a SQLite file, for any number of processes on one machine, without a server."""

from outrider.stores.sqlite.erasure import SqliteErasure
from outrider.stores.sqlite.inbox import SqliteInbox
from outrider.stores.sqlite.outbox import SqliteStore
from outrider.stores.sqlite.payload import SqlitePayloads
from outrider.stores.sqlite.privacy import SqlitePrivacy
from outrider.stores.sqlite.saga import SqliteSagas
from outrider.stores.sqlite.schema import SqliteSchema

__all__ = [
    "SqliteErasure",
    "SqliteInbox",
    "SqlitePayloads",
    "SqlitePrivacy",
    "SqliteSagas",
    "SqliteSchema",
    "SqliteStore",
]
