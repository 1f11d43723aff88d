"""The PostgreSQL store's named statements."""

from __future__ import annotations

from functools import cache

from outrider.event import SKIPPED_TYPE
from outrider.stores import queries

_PACKAGE = "outrider.stores.postgres"
_FILES = ("lanes", "fetch", "settle", "stage", "desk", "upkeep", "examine")


@cache
def load(schema: str) -> dict[str, str]:
    """Return every statement by name.

    >>> load("outrider")["release"].startswith("-- Give lanes back")
    True
    """
    known = constants(schema)
    known |= queries.load_fragments(_PACKAGE, "sql/fragments.sql", known)
    return {name: sql for file in _FILES for name, sql in queries.load(_PACKAGE, f"sql/{file}.sql", known).items()}


def constants(schema: str, lanes: int = 0) -> dict[str, str]:
    """Return what the `.sql` files may refer to; the number of lanes is for the migrations only."""
    return {**queries.constants(schema), "lanes": str(lanes), "skipped_type": SKIPPED_TYPE}
