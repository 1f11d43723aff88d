"""Named SQL blocks from `.sql` files.

A block starts with `-- name: verb` and runs to the next one. `{word}` stands for a constant of ours (the schema, a list
of states), never for a value: values are always parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

from outrider import lifecycle
from outrider.errors import BadSetting

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_CONSTANT = re.compile(r"\{(\w+)\}")
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}")


def load(package: str, filename: str, constants: Mapping[str, str]) -> dict[str, str]:
    """Return the blocks of a file by name, in file order, with constants filled in.

    >>> sorted(load("outrider.stores.postgres", "sql/lanes.sql", constants("outrider")))[:2]
    ['alive', 'beat']
    """
    return {name: fill(body, constants) for name, body in blocks(package, filename)}


def load_fragments(package: str, filename: str, constants: Mapping[str, str]) -> dict[str, str]:
    """Return blocks that are pieces of statements; a piece may refer to those before it."""
    pieces: dict[str, str] = {}
    for name, body in blocks(package, filename):
        pieces[name] = fill(body, {**constants, **pieces})
    return pieces


def blocks(package: str, filename: str) -> list[tuple[str, str]]:
    """Return the blocks of a file as written."""
    _, *parts = _NAME.split((files(package) / filename).read_text())
    return list(zip(parts[::2], parts[1::2], strict=True))


def fill(body: str, constants: Mapping[str, str]) -> str:
    """Put constants into a block."""
    return _CONSTANT.sub(lambda found: constants[found[1]], body).strip()


def constants(schema: str = "") -> dict[str, str]:
    """Return what every file may refer to: the schema, and the guards that come from the table of moves."""
    guards = {f"{move}_guard": lifecycle.sql_list(lifecycle.guard(move)) for move in lifecycle.MOVES}
    return {
        "schema": schema and identifier(schema),
        "fetchable": lifecycle.sql_list(lifecycle.FETCHABLE),
        "waiting": lifecycle.sql_list(lifecycle.WAITING),
        "stored": lifecycle.sql_list(lifecycle.STORED),
        "stored_moves": ", ".join(f"('{source}', '{target}')" for source, target in lifecycle.stored_moves()),
        **guards,
    }


def identifier(name: str) -> str:
    """Return the name if it is safe as an unquoted SQL identifier.

    >>> identifier("outrider")
    'outrider'
    """
    if not _IDENTIFIER.fullmatch(name):
        raise BadSetting(f"schema name {name!r} is not allowed; use a-z, 0-9 and _, at most 63, no digit first")
    return name
