"""Output of commands: tables and text for people, JSON for programs; errors and exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from outrider.errors import OutriderError, Transient, UsageError
from outrider.redaction import Redactor, redacted
from outrider.tracebacks import summary_of, traceback_text

if TYPE_CHECKING:
    from rich.console import Console

# rich is imported by the output that needs it: a relay and a `--json` command do not.

PIPE_WIDTH = 200
"""The width without a terminal: identifiers must survive `grep` and `cut`."""

CHECK_RESULT, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130

DEBUG = "OUTRIDER_DEBUG"

TRACEBACK_CHARACTERS_MAX = 50_000


def console() -> Console:
    """Return the console for results; a new one per use, because tests and pipes replace standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, emoji=False, markup=False)


def say(text: str) -> None:
    """Print a line for people."""
    console().print(text, soft_wrap=True)


def emit(data: Any) -> None:
    """Print data for programs, on one line."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, default=_plain) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def show_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, empty: str) -> None:
    """Print rows as a table, or the text for an empty table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.replace("_", " "), no_wrap=column.endswith("_id"), overflow="fold")
    for row in rows:
        table.add_row(*(cell(row.get(column)) for column in columns))
    if table.row_count:
        console().print(table)
    else:
        say(empty)


def show_facts(facts: Mapping[str, Any]) -> None:
    """Print facts, one per line, without those that are None."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(name.replace("_", " "), cell(value))
    console().print(table)


def cell(value: Any) -> str:
    """Return a value as text for people.

    >>> cell(None), cell({"a": 1})
    ('-', '{"a": 1}')
    """
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


class NotDone(OutriderError):
    """A command was not done, or only in part."""


def exit_code(error: OutriderError) -> int:
    """Return the exit code of an error.

    >>> exit_code(UsageError("no store given"))
    2
    """
    if isinstance(error, UsageError):
        return USAGE
    return UNREACHABLE if isinstance(error, Transient) else CHECK_RESULT


def report(text: str, code: int, *, as_json: bool) -> None:
    """Print an error, with the passwords of URLs hidden."""
    line = " ".join(redacted(text).encode(errors="backslashreplace").decode().split())
    shown = json.dumps({"error": line, "exit": code}, ensure_ascii=False) if as_json else f"outrider: {line}"
    typer.echo(shown, err=True)


def warn(text: str, *, as_json: bool) -> None:
    """Print a warning on standard error."""
    typer.echo(json.dumps({"warning": text}, ensure_ascii=False) if as_json else f"outrider: {text}", err=True)


class Group(TyperGroup):
    """The root command. Errors are caught here, so the console script, `python -m` and the test runner agree."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command and exit with its code."""
        given = list(sys.argv[1:] if args is None else args)
        # Typer's own report would repeat the arguments, passwords included.
        extra["standalone_mode"] = False
        try:
            code = super().main(given, *rest, **extra)
        except (Exception, KeyboardInterrupt) as error:
            code = _fail(error, as_json="--json" in given)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(error: BaseException, *, as_json: bool) -> int:
    error = _cause(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort) or type(error).__name__ == "Abort":
        report("stopped", INTERRUPTED, as_json=as_json)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader closed the pipe, as `head` does. Without this, Python would complain again at its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OutriderError):
        text, code = str(error), exit_code(error)
    elif hasattr(error, "format_message"):
        # Some versions of Typer bring their own click, so usage errors are recognised by this method.
        text, code = f"{error.format_message()} (see --help)", USAGE
    else:
        hint = "" if os.environ.get(DEBUG) else f" (not expected; {DEBUG}=1 shows where it happened)"
        text, code = f"{summary_of(error, Redactor())}{hint}", CHECK_RESULT
    if os.environ.get(DEBUG):
        typer.echo(traceback_text(error, Redactor(), TRACEBACK_CHARACTERS_MAX), err=True)
    report(text, code, as_json=as_json)
    return code


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = next((e for e in error.exceptions if isinstance(e, OutriderError)), error.exceptions[0])
    return error
