"""From errors to exit codes: one clean line on standard error, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from outrider.config import redacted
from outrider.errors import Misuse, OutriderError, Transient

FINDING, USAGE, UNREACHABLE = 1, 2, 3


class Finding(OutriderError):
    """What was asked for could not be done, or is not as it should be."""


def exit_code(error: OutriderError) -> int:
    """Return what a script sees.

    >>> exit_code(Misuse("no store given"))
    2
    """
    if isinstance(error, Misuse):
        return USAGE
    return UNREACHABLE if isinstance(error, Transient) else FINDING


def report(text: str, code: int, *, as_json: bool) -> None:
    """Print an error, with the passwords of URLs hidden."""
    line = " ".join(redacted(text).split())
    shown = json.dumps({"error": line, "exit": code}, ensure_ascii=False) if as_json else f"outrider: {line}"
    typer.echo(shown, err=True)


class Group(TyperGroup):
    """The root command. Catching errors here makes the console script, `python -m` and the tests' runner agree."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command and exit with its code."""
        given = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in given
        # Typer's own report of a wrong usage is good for people; for programs it has to be an object.
        extra["standalone_mode"] = not as_json
        try:
            code = super().main(given, *rest, **extra)
        except OutriderError as error:
            code = exit_code(error)
            report(str(error), code, as_json=as_json)
        except Exception as error:
            # Typer brings a click of its own in some versions, so its usage errors are known by what they can do.
            if not (as_json and hasattr(error, "format_message")):
                raise
            code = getattr(error, "exit_code", USAGE)
            report(error.format_message(), code, as_json=True)
        sys.exit(code if isinstance(code, int) else 0)
