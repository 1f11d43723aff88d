"""Every kind of connection, by name, and the fixture of the database it is tried on."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.contract.drivers import django_case, driver_cases, sqlalchemy_cases
from tests.contract.drivers.connection_case import Case
from tests.contract.drivers.databases import Database

POSTGRES: dict[str, type[Case]] = {
    "asyncpg": driver_cases.AsyncpgConnection,
    "asyncpg-pool": driver_cases.Asyncpg,
    "psycopg": driver_cases.Psycopg,
    "psycopg-block": driver_cases.PsycopgBlock,
    "psycopg-async": driver_cases.PsycopgAsync,
    "sqlalchemy-session-psycopg": sqlalchemy_cases.AlchemySession,
    "sqlalchemy-scoped-psycopg": sqlalchemy_cases.AlchemyScoped,
    "sqlalchemy-connection-psycopg": sqlalchemy_cases.AlchemyConnection,
    "sqlalchemy-async-session-asyncpg": sqlalchemy_cases.AlchemyAsyncSession,
    "sqlalchemy-async-scoped-asyncpg": sqlalchemy_cases.AlchemyAsyncScoped,
    "sqlalchemy-async-connection-asyncpg": sqlalchemy_cases.AlchemyAsyncConnection,
    "sqlalchemy-run-sync-asyncpg": sqlalchemy_cases.AlchemyRunSync,
    "sqlalchemy-async-session-psycopg": sqlalchemy_cases.AlchemyPsycopgAsyncSession,
    "sqlalchemy-async-connection-psycopg": sqlalchemy_cases.AlchemyPsycopgAsyncConnection,
    "django-postgres": django_case.Django,
    "django-proxy-postgres": django_case.DjangoProxy,
}
SQLITE: dict[str, type[Case]] = {
    "sqlite3": driver_cases.Sqlite3,
    "aiosqlite": driver_cases.Aiosqlite,
    "sqlalchemy-session-sqlite": sqlalchemy_cases.AlchemySqliteSession,
    "sqlalchemy-session-sqlite-by-hand": sqlalchemy_cases.AlchemySqliteByHand,
    "sqlalchemy-connection-sqlite": sqlalchemy_cases.AlchemySqliteConnection,
    "sqlalchemy-async-session-aiosqlite": sqlalchemy_cases.AlchemyAiosqliteSession,
    "sqlalchemy-async-connection-aiosqlite": sqlalchemy_cases.AlchemyAiosqliteConnection,
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
