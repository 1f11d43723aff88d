"""Django's connections: each transaction is an `atomic()` of its own, on a thread of its own.

Django keeps a connection for every thread. It is closed or kept after each transaction as CONN_MAX_AGE says, and
replaced when it is broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction

from outrider.drivers.django import BROKEN, VENDORS
from outrider.drivers.lending.below import below
from outrider.drivers.lending.threaded import ThreadedLender
from outrider.drivers.lending.work import Work
from outrider.errors import Misuse

LENDABLE = 10
"""Transactions, and so threads and connections, at a time."""

_UNCHANGED = object()
FORBIDDEN = "forbidden when an 'atomic' block is active"
LEFT_OPEN = "an atomic block was entered and not left, so nothing can be committed; use `with transaction.atomic():`"


@dataclass(frozen=True, slots=True)
class DjangoTransactions:
    """Says that transactions are to be Django's, of the database with this alias."""

    using: str = "default"


class DjangoWork(Work):
    """A transaction inside `atomic()`."""

    SAVEPOINT = "with transaction.atomic(): ..."

    def __init__(self, conn: Any) -> None:
        self.given = conn
        conn.close_if_unusable_or_obsolete()
        conn.ensure_connection()
        if not conn.get_autocommit():
            # With AUTOCOMMIT off, leaving a block commits nothing. Such a connection is not kept afterwards.
            conn.set_autocommit(True)
        self._raw = conn.connection
        self._level: Any = _UNCHANGED
        self.below = below(self._raw)
        if conn.vendor == "postgresql":
            self._read_committed()
        self._block = transaction.atomic(using=conn.alias, durable=True)
        self._block.__enter__()
        if conn.vendor == "sqlite":
            # Django begins in a way that may fail half-way, when somebody else has written meanwhile.
            self._raw.execute("COMMIT")
            self._raw.execute("BEGIN IMMEDIATE")

    @property
    def gone(self) -> bool:
        conn = self.given
        return conn.closed_in_transaction or not conn.in_atomic_block or conn.connection is not self._raw

    @property
    def spoilt(self) -> bool:
        return bool(self.given.needs_rollback)

    def begin(self) -> None:
        if not self.below.begun:
            self.below.execute("SELECT 1")

    def settle(self) -> None:
        if self.given.needs_rollback:
            raise transaction.TransactionManagementError(BROKEN)
        if self.given.savepoint_ids:
            raise transaction.TransactionManagementError(LEFT_OPEN)

    def commit(self) -> None:
        # Left with the mark of a failure, a block would roll back and say nothing; with another one open inside, it
        # would leave that one.
        self.settle()
        self._block.__exit__(None, None, None)

    def rollback(self) -> None:
        # Our own statements go past Django, so it has to be told that the connection may be broken.
        self.given.errors_occurred = True
        while self.given.in_atomic_block:
            self._block.__exit__(RuntimeError, RuntimeError(), None)

    def release(self) -> None:
        if self._level is not _UNCHANGED and not self.below.closed:
            self._raw.isolation_level = self._level
        self.given.close_if_unusable_or_obsolete()

    def forbidden(self, error: BaseException) -> bool:
        return isinstance(error, transaction.TransactionManagementError) and FORBIDDEN in str(error)

    def _read_committed(self) -> None:
        """Each statement must see what was committed before it began, whatever OPTIONS or the server say."""
        from psycopg import IsolationLevel

        if self._raw.isolation_level is not IsolationLevel.READ_COMMITTED:
            self._level, self._raw.isolation_level = self._raw.isolation_level, IsolationLevel.READ_COMMITTED


class Django(ThreadedLender):
    """The database with an alias."""

    def __init__(self, source: DjangoTransactions) -> None:
        self._alias, self.vendor = source.using, connections[source.using].vendor
        if self.vendor not in VENDORS:
            raise Misuse(f"cannot work in {self.vendor}; use django.db.backends.postgresql or sqlite3")
        super().__init__(LENDABLE)

    def open(self) -> Work:
        conn = connections[self._alias]
        try:
            return DjangoWork(conn)
        except BaseException:
            conn.close()
            raise

    def farewell(self) -> None:
        connections[self._alias].close()
