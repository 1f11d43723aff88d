"""Staging, and what sagas need, through Django's connections inside `atomic()`, by way of the driver below.

An error leaves the block marked for rollback, as one of Django's own queries would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction

from outrider.drivers.pump import NOT_INSTALLED
from outrider.drivers.recognise import driver, way_of
from outrider.drivers.verbs import Verbs
from outrider.errors import Misuse, NotInTransaction

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


def _perform(conn: Any, verb: str, args: tuple[Any, ...], schema: str) -> Any:
    _check(conn)
    way = way_of(conn.connection)
    with transaction.mark_for_rollback_on_error(using=conn.alias), _naming_migrate():
        return getattr(driver(way), verb)(conn.connection, *args, schema)


@contextmanager
def _naming_migrate() -> Iterator[None]:
    """Where the tables are missing, name Django's own command too: it needs no URL."""
    try:
        yield
    except Misuse as error:
        cause = error.__cause__
        if getattr(cause, "sqlstate", None) in NOT_INSTALLED or str(cause).startswith("no such "):
            raise Misuse(f"{error}; {MIGRATE}") from cause
        raise


def _check(conn: Any) -> None:
    if conn.vendor not in VENDORS:
        raise Misuse(f"cannot stage into {conn.vendor}; use django.db.backends.postgresql or sqlite3")
    # We go past Django's own cursor, which would ask.
    conn.validate_thread_sharing()
    if conn.in_atomic_block and conn.connection is None:
        raise Misuse("this connection was closed, and its transaction with it; leave the atomic block and begin again")
    if not conn.in_atomic_block and conn.get_autocommit():
        raise NotInTransaction(NOT_ATOMIC)
    if conn.needs_rollback:
        raise Misuse(BROKEN)


_verbs = Verbs(_perform)
stage, start_saga, post_mail = _verbs.stage, _verbs.start_saga, _verbs.post_mail
barrier_enter, barrier_keep = _verbs.barrier_enter, _verbs.barrier_keep
