"""Every kind of connection, by name, and the fixture of the database it is tried on."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.contract.drivers import alchemy, django_case, plain
from tests.contract.drivers.case import Case
from tests.contract.drivers.databases import Database

POSTGRES: dict[str, type[Case]] = {
    "asyncpg": plain.AsyncpgConnection,
    "asyncpg-pool": plain.Asyncpg,
    "psycopg": plain.Psycopg,
    "psycopg-block": plain.PsycopgBlock,
    "psycopg-async": plain.PsycopgAsync,
    "sqlalchemy-session-psycopg": alchemy.AlchemySession,
    "sqlalchemy-scoped-psycopg": alchemy.AlchemyScoped,
    "sqlalchemy-connection-psycopg": alchemy.AlchemyConnection,
    "sqlalchemy-async-session-asyncpg": alchemy.AlchemyAsyncSession,
    "sqlalchemy-async-scoped-asyncpg": alchemy.AlchemyAsyncScoped,
    "sqlalchemy-async-connection-asyncpg": alchemy.AlchemyAsyncConnection,
    "sqlalchemy-run-sync-asyncpg": alchemy.AlchemyRunSync,
    "sqlalchemy-async-session-psycopg": alchemy.AlchemyPsycopgAsyncSession,
    "sqlalchemy-async-connection-psycopg": alchemy.AlchemyPsycopgAsyncConnection,
    "django-postgres": django_case.Django,
    "django-proxy-postgres": django_case.DjangoProxy,
}
SQLITE: dict[str, type[Case]] = {
    "sqlite3": plain.Sqlite3,
    "aiosqlite": plain.Aiosqlite,
    "sqlalchemy-session-sqlite": alchemy.AlchemySqliteSession,
    "sqlalchemy-session-sqlite-by-hand": alchemy.AlchemySqliteByHand,
    "sqlalchemy-connection-sqlite": alchemy.AlchemySqliteConnection,
    "sqlalchemy-async-session-aiosqlite": alchemy.AlchemyAiosqliteSession,
    "sqlalchemy-async-connection-aiosqlite": alchemy.AlchemyAiosqliteConnection,
    "django-sqlite": django_case.Django,
}


POOLED = ("asyncpg-pool", "psycopg", "sqlalchemy-async-session-asyncpg")
"""The kinds that are tried behind PgBouncer as well: the drivers differ there in how they prepare statements."""


class Chosen(NamedTuple):
    """A kind of connection, and a database for it."""

    kind: type[Case]
    database: Database


def chosen_of(request: pytest.FixtureRequest) -> Chosen:
    """Return what a parameter names. Not for asynchronous fixtures: servers are started before any event loop."""
    kind, database = request.param
    return Chosen(kind, request.getfixturevalue(database))


def params(postgres: dict[str, type[Case]], sqlite: dict[str, type[Case]], *, pooled: bool = True) -> list[Any]:
    """Return cases for a fixture: the kinds of `POOLED` also behind PgBouncer."""
    marks = [pytest.mark.postgres]
    found = [pytest.param((kind, "postgres_database"), id=name, marks=marks) for name, kind in postgres.items()]
    if pooled:
        marks = [pytest.mark.postgres, pytest.mark.pgbouncer]
        found += [
            pytest.param((kind, "pooled_database"), id=f"{name}-pgbouncer", marks=marks)
            for name, kind in postgres.items()
            if name in POOLED
        ]
    return found + [pytest.param((kind, "sqlite_database"), id=name) for name, kind in sqlite.items()]
