"""Lenders: they let handlers and the steps of sagas work in transactions of the application's own kind.

Which kind it is, is told by where its type comes from, so that no driver is imported needlessly.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from outrider.errors import Misuse
from outrider.stores.loans import Lender

_KINDS = {
    ("sqlalchemy", "sessionmaker"): ("alchemy", "Alchemy"),
    ("sqlalchemy", "Engine"): ("alchemy", "Alchemy"),
    ("sqlalchemy", "async_sessionmaker"): ("alchemy", "AwaitedAlchemy"),
    ("sqlalchemy", "AsyncEngine"): ("alchemy", "AwaitedAlchemy"),
    ("psycopg_pool", "ConnectionPool"): ("psycopg", "PsycopgPool"),
    ("psycopg_pool", "AsyncConnectionPool"): ("psycopg", "AwaitedPsycopgPool"),
    ("outrider", "DjangoTransactions"): ("django", "Django"),
}
ACCEPTED = (
    "give a sessionmaker, async_sessionmaker, Engine or AsyncEngine of SQLAlchemy, a ConnectionPool or "
    "AsyncConnectionPool of psycopg_pool, a function that returns a psycopg connection, or "
    "outrider.django.transactions()"
)


def lender_of(source: Any) -> Lender:
    """Return a lender of the kind of transactions that an application has; refuse what is none.

    >>> lender_of(7)
    Traceback (most recent call last):
    ...
    outrider.errors.Misuse: `transactions` cannot be a builtins.int; give a sessionmaker, async_sessionmaker, ...
    """
    kind: Any = type(source)
    for base in kind.__mro__:
        if found := _KINDS.get((base.__module__.partition(".")[0], base.__qualname__)):
            return _made(*found, source)
    if inspect.isfunction(source) or inspect.ismethod(source) or hasattr(source, "func"):
        return _made("psycopg", "AwaitedPsycopgPool" if inspect.iscoroutinefunction(source) else "PsycopgPool", source)
    raise Misuse(f"`transactions` cannot be a {kind.__module__}.{kind.__qualname__}; {ACCEPTED}")


def _made(module: str, name: str, source: Any) -> Lender:
    lender: Lender = getattr(import_module(f"outrider.drivers.lending.{module}"), name)(source)
    return lender
