"""Named SQL blocks from `.sql` files.

A statement starts with `-- name: verb` and runs to the next block. A fragment starts with `-- fragment: name`; later
blocks, in the same file and in files loaded after, include the fragment as `{name}`. `{word}` may also be a constant
(the schema, a list of states). A placeholder is never a value: values are always parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

from outrider.errors import InvalidSetting
from outrider.event import ERASED_FAILURE, ERASED_TEXT
from outrider.outbox import model
from outrider.retry import ATTEMPTS_MAX

_BLOCK = re.compile(r"^-- (name|fragment): (\w+)\n", re.MULTILINE)
_SECTION = re.compile(r"(\n--[^\n]*)+\s*\Z")
_CONSTANT = re.compile(r"\{(\w+)\}")
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}")


def load(package: str, filenames: Sequence[str], constants: Mapping[str, str]) -> dict[str, str]:
    """Return the statements of some files by name, in file order, with constants and fragments filled in.

    >>> sorted(load("outrider.stores.postgres", ["sql/inbox.sql"], constants("outrider") | {"costly": "false"}))[:2]
    ['adopt_orphans', 'blocked_streams']
    """
    known = dict(constants)
    statements: dict[str, str] = {}
    for filename in filenames:
        for kind, name, body in blocks(package, filename):
            (statements if kind == "name" else known)[name] = fill(body, known)
    return statements


def blocks(package: str, filename: str) -> list[tuple[str, str, str]]:
    """Return the blocks of a file as written: kind (`name` or `fragment`), name and text."""
    _, *parts = _BLOCK.split((files(package) / filename).read_text())
    # A comment after the last line of a block introduces the section below the block.
    return [(kind, name, _SECTION.sub("", body)) for kind, name, body in zip(*[iter(parts)] * 3, strict=True)]


def fill(body: str, constants: Mapping[str, str]) -> str:
    """Replace the placeholders of a block by constants."""
    return _CONSTANT.sub(lambda found: constants[found[1]], body).strip()


def constants(schema: str = "") -> dict[str, str]:
    """Return the constants of every file: the schema, and the guards from the table of state transitions."""
    guards = {f"{transition}_guard": model.sql_list(model.guard(transition)) for transition in model.TRANSITIONS}
    return {
        "schema": schema and identifier(schema),
        "fetchable": model.sql_list(model.FETCHABLE),
        "waiting": model.sql_list(model.WAITING),
        "stored": model.sql_list(model.STORED),
        "attempts_max": str(ATTEMPTS_MAX),
        "erased": ERASED_TEXT,
        "erased_failure": ERASED_FAILURE,
        "claim_seconds_max": f"{model.CLAIM_SECONDS_MAX:g}",
        "stored_transitions": ", ".join(f"('{source}', '{target}')" for source, target in model.stored_transitions()),
        **guards,
    }


def identifier(name: str) -> str:
    """Return the name if it is safe as an unquoted SQL identifier.

    >>> identifier("outrider")
    'outrider'
    """
    if not _IDENTIFIER.fullmatch(name):
        raise InvalidSetting(f"schema name {name!r} is not allowed; use a-z, 0-9 and _, at most 63, no digit first")
    return name
