"""The stores in PostgreSQL: the outbox's, and those of inbox and sagas beside the data that their code changes.

They are imported when they are asked for: the statements beside them also serve applications that use another driver
and have no asyncpg.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.stores.postgres.inbox import PostgresInbox
    from outrider.stores.postgres.saga import PostgresSagas
    from outrider.stores.postgres.schema import PostgresSchema
    from outrider.stores.postgres.store import PostgresStore

__all__ = ["PostgresInbox", "PostgresSagas", "PostgresSchema", "PostgresStore"]

_WHERE = {
    "PostgresInbox": "outrider.stores.postgres.inbox",
    "PostgresSagas": "outrider.stores.postgres.saga",
    "PostgresSchema": "outrider.stores.postgres.schema",
    "PostgresStore": "outrider.stores.postgres.store",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
