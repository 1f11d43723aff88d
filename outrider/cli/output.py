"""What commands print: tables and words for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 200
"""Columns when the output is no terminal: identifiers must survive `grep` and `cut`."""


def console() -> Console:
    """Return where results go. Made per use, because tests and pipes exchange standard output."""
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
    """Print rows as a table, or say that there are none."""
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
    """Print one thing's facts, a line each; what is not set is left out."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(name.replace("_", " "), cell(value))
    console().print(table)


def cell(value: Any) -> str:
    """Write one value for people.

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
