"""The stores in PostgreSQL: outbox, inbox and sagas, beside the data of the application.

The stores are imported on first use, because applications with another driver use the statements of this package
without asyncpg.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.stores.postgres.inbox import PostgresInbox
    from outrider.stores.postgres.outbox import PostgresStore
    from outrider.stores.postgres.saga import PostgresSagas
    from outrider.stores.postgres.schema import PostgresSchema

__all__ = ["PostgresInbox", "PostgresSagas", "PostgresSchema", "PostgresStore"]

_WHERE = {
    "PostgresInbox": "outrider.stores.postgres.inbox",
    "PostgresSagas": "outrider.stores.postgres.saga",
    "PostgresSchema": "outrider.stores.postgres.schema",
    "PostgresStore": "outrider.stores.postgres.outbox",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
