"""What drivers raise around a lent transaction, in our words: by SQLSTATE, or by the kind of the driver's exception.

SQLAlchemy keeps the driver's error in `orig`, Django in `__cause__`, so the whole chain is looked at.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.errors import Misuse, OutriderError, Permanent, Transient, Unreachable
from outrider.stores.sqlite import database as sqlite

WHERE = "the database of `transactions`"
FAILED = "25P02"
"""An error was swallowed, and the transaction takes no more statements."""

_FAREWELLS = ("08", "57P01", "57P02")
# By how a code begins; the first that fits counts.
_BY_SQLSTATE: tuple[tuple[tuple[str, ...], type[OutriderError], str], ...] = (
    (
        ("42P01", "42883", "3F000"),
        Misuse,
        "the outbox is not installed in {where} ({error}); run: outrider db migrate",
    ),
    (("25006",), Misuse, "{where} is a read replica; let `transactions` lead to the primary"),
    (("28", "3D000"), Misuse, "{where} refused the connection: {error}; check user, password and database"),
    (("42501",), Misuse, "{where}: {error}; grant the role USAGE on the schema and rights on its tables"),
    (("08P01",), Misuse, "{where} refused how we speak to it ({error}); behind a pooler, prepare no statements"),
    (("08", "57P03"), Unreachable, "{where} does not answer ({error}); is it running?"),
    (("40001", "40P01", "55P03", "53", "57", "25P03"), Transient, "{where}: {error}"),
)
_AWAY_NAMES = frozenset({"OperationalError", "InterfaceError", "InternalClientError", "OSError", "TimeoutError"})


def chain(error: BaseException) -> list[BaseException]:
    """Return an error and those that it was made of.

    >>> [str(each) for each in chain(ValueError("7"))]
    ['7']
    """
    found: list[BaseException] = []
    below: BaseException | None = error
    while isinstance(below, BaseException) and below not in found:
        found.append(below)
        below = getattr(below, "orig", None) or below.__cause__
    return found


def sqlstate_of(error: BaseException) -> str:
    """Return PostgreSQL's code of an error, or nothing.

    >>> sqlstate_of(ValueError("7"))
    ''
    """
    return next((str(code) for each in chain(error) if (code := getattr(each, "sqlstate", None))), "")


def is_farewell(error: BaseException) -> bool:
    """Tell whether an error may be the last that is heard from a connection, which the driver notices a little later.

    >>> is_farewell(ValueError("7"))
    False
    """
    return sqlstate_of(error).startswith(_FAREWELLS)


@contextmanager
def told(explain: Callable[[BaseException], None] | None = None) -> Iterator[None]:
    """Turn errors of our own steps into ours. A plain TimeoutError passes: whoever has set the limit knows its name."""
    try:
        yield
    except (OutriderError, asyncio.CancelledError):
        raise
    except Exception as error:
        if type(error) is TimeoutError:
            raise
        if explain:
            explain(error)
        raise translation(error) from error


def translation(error: Exception) -> OutriderError:
    """Return an error in our words. What is nobody else's is what the application has done, and permanent.

    >>> type(translation(OSError("away"))).__name__
    'Unreachable'
    """
    if lite := [each for each in chain(error) if isinstance(each, sqlite3.Error)]:
        return sqlite.translation(lite[0]) or Permanent(f"SQLite: {type(lite[0]).__name__}: {lite[0]}")
    if code := sqlstate_of(error):
        return _by_sqlstate(code, error)
    if any(_AWAY_NAMES.intersection(kind.__name__ for kind in type(each).__mro__) for each in chain(error)):
        return Unreachable(f"{WHERE} does not answer ({type(error).__name__}: {error}); is it running?")
    return Permanent(f"{WHERE}: {type(error).__name__}: {error}")


def _by_sqlstate(code: str, error: Exception) -> OutriderError:
    for beginnings, kind, said in _BY_SQLSTATE:
        if code.startswith(beginnings):
            return kind(said.format(where=WHERE, error=error))
    return Permanent(f"{WHERE}: {type(error).__name__}: {error}")
