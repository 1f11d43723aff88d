"""What to say when somebody's module cannot be imported: their own traceback, and one line with the place."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

import typer

from outrider.config import redacted
from outrider.errors import Misuse, OutriderError
from outrider.where import short_path, where


def cannot_import(module_name: str, error: Exception) -> Misuse:
    """Return the error to be told; the traceback, without our part of it, goes to standard error first.

    >>> str(cannot_import("shop.handlers", Misuse("a handler needs the type of its events")))
    'shop.handlers cannot be imported: a handler needs the type of its events'
    """
    if isinstance(error, OutriderError):
        text = str(error)
    else:
        shown = traceback.format_exception(type(error), error, _theirs(error.__traceback__))
        typer.echo(redacted("".join(shown)).rstrip(), err=True)
        text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    place = _place(error)
    return Misuse(f"{module_name} cannot be imported: {text}{f' ({place})' if place else ''}")


def _place(error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}, line {error.lineno}"
    path, _, line = (where(error) or "").partition(" in ")[0].rpartition(":")
    return f"{path}, line {line}" if path else ""


def _theirs(shown: TracebackType | None) -> TracebackType | None:
    """Leave out the frames before the module's own: ours, and those of the import itself."""
    while shown is not None and _before(shown.tb_frame.f_code.co_filename):
        shown = shown.tb_next
    return shown


def _before(path: str) -> bool:
    return "importlib" in path or Path(path).parent == Path(__file__).parent
