"""The PostgreSQL store's named statements."""

from __future__ import annotations

from collections.abc import Sequence
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
    return _load(schema, "fragments", _FILES)


@cache
def load_inbox(schema: str, file: str = "inbox") -> dict[str, str]:
    """Return the statements of a consumer (`inbox`), or of people who look after one (`inbox_desk`).

    >>> "admit_one" in load_inbox("outrider")
    True
    """
    return _load(schema, "inbox_fragments", (file,))


@cache
def load_saga(schema: str, file: str = "saga") -> dict[str, str]:
    """Return the statements of those who start, run and answer sagas (`saga`), or of people who ask (`saga_desk`).

    >>> "claim" in load_saga("outrider")
    True
    """
    return _load(schema, "saga_fragments", (file,))


def _load(schema: str, fragments: str, files: Sequence[str]) -> dict[str, str]:
    known = constants(schema)
    known |= queries.load_fragments(_PACKAGE, f"sql/{fragments}.sql", known)
    return {name: sql for file in files for name, sql in queries.load(_PACKAGE, f"sql/{file}.sql", known).items()}


def constants(schema: str, lanes: int = 0) -> dict[str, str]:
    """Return what the `.sql` files may refer to; the number of lanes is for the migrations only."""
    return {**queries.constants(schema), "lanes": str(lanes), "skipped_type": SKIPPED_TYPE}
