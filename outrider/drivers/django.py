"""Staging and saga operations through Django's connections inside `atomic()`, which delegate to the raw driver.

An error marks the block for rollback, like an error of a Django query.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction

from outrider.drivers.async_transactions import OpenTransaction
from outrider.drivers.base import NOT_INSTALLED
from outrider.drivers.connections import raw_connection
from outrider.drivers.detect import driver, driver_of
from outrider.drivers.threaded_transactions import ThreadedTransactionSource
from outrider.errors import NotInTransaction, UsageError

NOT_ATOMIC = (
    "this connection commits every statement by itself, so event or saga could not share your change's fate; stage "
    "inside `with transaction.atomic():`"
)

BROKEN = (
    "an error was caught inside this atomic block, so it will be rolled back and nothing can be staged in it; put what "
    "may fail into a `with transaction.atomic():` of its own"
)

MIGRATE = 'or put "outrider.django" into INSTALLED_APPS and run: manage.py migrate outrider'

VENDORS = ("postgresql", "sqlite")

TRANSACTIONS_MAX = 10
"""The limit of concurrent transactions, and therefore of threads and connections."""

_UNCHANGED = object()

FORBIDDEN = "forbidden when an 'atomic' block is active"

LEFT_OPEN = "an atomic block was entered and not left, so nothing can be committed; use `with transaction.atomic():`"


def run(conn: Any, operation: str, args: tuple[Any, ...], schema: str) -> Any:
    """Run an operation in the open transaction of the caller."""
    _check(conn)
    info = driver_of(conn.connection)
    with transaction.mark_for_rollback_on_error(using=conn.alias), _naming_migrate():
        return driver(info).run(conn.connection, operation, args, schema)


@contextmanager
def _naming_migrate() -> Iterator[None]:
    """Add Django's own command to the error for missing tables: `manage.py migrate` needs no URL."""
    try:
        yield
    except UsageError as error:
        cause = error.__cause__
        if getattr(cause, "sqlstate", None) in NOT_INSTALLED or str(cause).startswith("no such "):
            raise UsageError(f"{error}; {MIGRATE}") from cause
        raise


def _check(conn: Any) -> None:
    if conn.vendor not in VENDORS:
        raise UsageError(f"cannot stage into {conn.vendor}; use django.db.backends.postgresql or sqlite3")
    # The driver bypasses Django's own cursor, which would check this.
    conn.validate_thread_sharing()
    if conn.in_atomic_block and conn.connection is None:
        raise UsageError(
            "this connection was closed, and its transaction with it; leave the atomic block and begin again"
        )
    if not conn.in_atomic_block and conn.get_autocommit():
        raise NotInTransaction(NOT_ATOMIC)
    if conn.needs_rollback:
        raise UsageError(BROKEN)


@dataclass(frozen=True, slots=True)
class DjangoTransactions:
    """Selects Django's transactions of the database with this alias."""

    using: str = "default"


class DjangoTransaction(OpenTransaction):
    """A transaction inside `atomic()`."""

    SAVEPOINT = "with transaction.atomic(): ..."

    def __init__(self, conn: Any) -> None:
        self.connection = conn
        conn.close_if_unusable_or_obsolete()
        conn.ensure_connection()
        if not conn.get_autocommit():
            # With AUTOCOMMIT off, the end of a block does not commit. Such a connection is closed afterwards.
            conn.set_autocommit(True)
        self._raw = conn.connection
        self._level: Any = _UNCHANGED
        self.raw = raw_connection(self._raw)
        if conn.vendor == "postgresql":
            self._read_committed()
        self._block = transaction.atomic(using=conn.alias, durable=True)
        self._block.__enter__()
        if conn.vendor == "sqlite":
            # Django's begin may fail half-way, when another transaction has written meanwhile.
            self._raw.execute("COMMIT")
            self._raw.execute("BEGIN IMMEDIATE")

    @property
    def is_lost(self) -> bool:
        conn = self.connection
        return conn.closed_in_transaction or not conn.in_atomic_block or conn.connection is not self._raw

    @property
    def is_aborted(self) -> bool:
        return bool(self.connection.needs_rollback)

    def begin(self) -> None:
        if not self.raw.has_begun:
            self.raw.execute("SELECT 1")

    def settle(self) -> None:
        if self.connection.needs_rollback:
            raise transaction.TransactionManagementError(BROKEN)
        if self.connection.savepoint_ids:
            raise transaction.TransactionManagementError(LEFT_OPEN)

    def commit(self) -> None:
        # A block that is marked for rollback would roll back silently; with a nested block open, only the nested block
        # would end.
        self.settle()
        self._block.__exit__(None, None, None)

    def rollback(self) -> None:
        # Outrider's statements bypass Django: Django must be notified that the connection may be broken.
        self.connection.errors_occurred = True
        while self.connection.in_atomic_block:
            self._block.__exit__(RuntimeError, RuntimeError(), None)

    def release(self) -> None:
        if self._level is not _UNCHANGED and not self.raw.closed:
            self._raw.isolation_level = self._level
        self.connection.close_if_unusable_or_obsolete()

    def forbidden(self, error: BaseException) -> bool:
        return isinstance(error, transaction.TransactionManagementError) and FORBIDDEN in str(error)

    def _read_committed(self) -> None:
        """Set READ COMMITTED, regardless of OPTIONS and server: each statement must see all earlier commits."""
        from psycopg import IsolationLevel

        if self._raw.isolation_level is not IsolationLevel.READ_COMMITTED:
            self._level, self._raw.isolation_level = self._raw.isolation_level, IsolationLevel.READ_COMMITTED


class DjangoSource(ThreadedTransactionSource):
    """A transaction source over a database alias."""

    def __init__(self, source: DjangoTransactions) -> None:
        self._alias, self.vendor = source.using, connections[source.using].vendor
        if self.vendor not in VENDORS:
            raise UsageError(f"cannot work in {self.vendor}; use django.db.backends.postgresql or sqlite3")
        super().__init__(TRANSACTIONS_MAX)

    def begin(self) -> OpenTransaction:
        conn = connections[self._alias]
        try:
            return DjangoTransaction(conn)
        except BaseException:
            conn.close()
            raise

    def farewell(self) -> None:
        connections[self._alias].close()
