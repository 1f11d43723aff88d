"""From errors to exit codes: one clean line on standard error, or one JSON object."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from outrider.config import redacted
from outrider.errors import Misuse, OutriderError, Transient

FINDING, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130
DEBUG = "OUTRIDER_DEBUG"


class Undone(OutriderError):
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
    line = " ".join(redacted(text).encode(errors="backslashreplace").decode().split())
    shown = json.dumps({"error": line, "exit": code}, ensure_ascii=False) if as_json else f"outrider: {line}"
    typer.echo(shown, err=True)


class Group(TyperGroup):
    """The root command. Catching errors here makes the console script, `python -m` and the tests' runner agree."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command and exit with its code."""
        given = list(sys.argv[1:] if args is None else args)
        # Typer's own report would repeat what was typed, passwords included; so every error passes through ours.
        extra["standalone_mode"] = False
        try:
            code = super().main(given, *rest, **extra)
        except (Exception, KeyboardInterrupt) as error:
            code = _fail(error, as_json="--json" in given)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(error: BaseException, *, as_json: bool) -> int:
    """Report an error; return its exit code."""
    error = _cause(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort) or type(error).__name__ == "Abort":
        report("stopped", INTERRUPTED, as_json=as_json)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has seen enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OutriderError):
        text, code = str(error), exit_code(error)
    elif hasattr(error, "format_message"):
        # Typer brings a click of its own in some versions, so its usage errors are known by what they can do.
        text, code = f"{error.format_message()} (see --help)", USAGE
    else:
        told = "" if os.environ.get(DEBUG) else f" (not expected; {DEBUG}=1 shows where it happened)"
        text, code = f"{type(error).__name__}: {error}{told}", FINDING
    if os.environ.get(DEBUG):
        typer.echo(redacted("".join(traceback.format_exception(error))), err=True)
    report(text, code, as_json=as_json)
    return code


def _cause(error: BaseException) -> BaseException:
    """Return what a group of errors is about: ours if there is one, else the first."""
    while isinstance(error, BaseExceptionGroup):
        error = next((e for e in error.exceptions if isinstance(e, OutriderError)), error.exceptions[0])
    return error
