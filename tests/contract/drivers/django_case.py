"""Django's connections, inside `atomic()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import django
from django.conf import settings
from django.db import connections, transaction
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy

from tests.contract.drivers.connection_case import SyncCase
from tests.contract.drivers.databases import Database, PostgresDatabase, SqliteDatabase

if not settings.configured:
    settings.configure(USE_TZ=True, SECRET_KEY="of a test")
    django.setup()

ALIAS = "outrider_test"


def described(database: Database) -> dict[str, Any]:
    """Return a database in the words of Django's settings."""
    if isinstance(database, SqliteDatabase):
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": database.path}
    assert isinstance(database, PostgresDatabase)
    at = urlsplit(database.url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": at.path.removeprefix("/"),
        "USER": at.username,
        "PASSWORD": at.password or "",
        "HOST": at.hostname,
        "PORT": at.port,
    }


class Django(SyncCase):
    """`connections[alias]`."""

    hooked = True

    @contextmanager
    def begun(self) -> Iterator[Any]:
        with self.unbegun() as conn, transaction.atomic(using=ALIAS):
            yield conn

    @contextmanager
    def nested(self, conn: Any) -> Iterator[Any]:
        with transaction.atomic(using=ALIAS):
            yield conn

    @contextmanager
    def unbegun(self) -> Iterator[Any]:
        # Connections are kept by thread, and threads differ from test to test.
        connections[ALIAS] = ConnectionHandler({"default": {}, ALIAS: described(self.database)})[ALIAS]
        try:
            yield self.open()
        finally:
            connections[ALIAS].close()
            del connections[ALIAS]

    def open(self) -> Any:
        return connections[ALIAS]

    def insert(self, conn: Any, what: str) -> None:
        with conn.cursor() as cursor:
            cursor.execute("INSERT INTO notes VALUES (%s)", [what])

    def end(self) -> None:
        pass


class DjangoProxy(Django):
    """`django.db.connection`, which stands for a connection of the thread."""

    def open(self) -> Any:
        return ConnectionProxy(connections, ALIAS)
