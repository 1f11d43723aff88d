"""The command line.

Exit codes: 0 done, 1 a finding (something is not as it should be, or was not found), 2 invalid usage or settings, 3 a
server is unreachable. With `--json` a result is one JSON object or list on standard output, and an error one object on
standard error. A command that is done in part prints a result and an error.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
import typer.main

import outrider
from outrider.cli.output import Group


class Entry(NamedTuple):
    """One line of the table of commands: the module, and the name of the function or of the group in the module."""

    module: str
    name: str = "app"
    hidden: bool = False


COMMANDS = {
    "relay": Entry("relay", "relay"),
    "consume": Entry("consume", "consume"),
    "doctor": Entry("doctor", "doctor"),
    "erase": Entry("erase", "erase"),
    "explain": Entry("explain", "explain"),
    "lifecycle": Entry("events", "lifecycle"),
    "demo": Entry("demo", "demo"),
    "config": Entry("config"),
    "db": Entry("db"),
    "events": Entry("events"),
    "dead-letters": Entry("dead_letters"),
    "dlq": Entry("dead_letters", hidden=True),
    "inbox": Entry("inbox"),
    "saga": Entry("saga"),
    "audit": Entry("audit"),
    "schema": Entry("schema"),
    "docs": Entry("docs"),
    "keys": Entry("keys"),
}
"""Every command and group of commands, in the order of `--help`."""


class _Commands(UserDict[str, Any]):
    """The commands by name; the module of a command is imported when the command is looked up."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, Entry):
            found = self.data[name] = _import(name, found)
        return found


@cache
def _import(name: str, entry: Entry) -> Any:
    found: typer.Typer | Callable[..., None] = getattr(import_module(f"{__name__}.{entry.module}"), entry.name)
    parent = typer.Typer()
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name, hidden=entry.hidden)
    else:
        parent.command(name, hidden=entry.hidden)(found)
    return typer.main.get_group(parent).commands[name]


class RootGroup(Group):
    """The root command: each process imports the command that it runs, and no other."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(COMMANDS)


app = typer.Typer(
    name="outrider",
    cls=RootGroup,
    help="Transactional outbox, inbox and sagas. If the transaction commits, its event is delivered, in order per key; "
    "at the other end, its effect happens once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {outrider.__version__}")
        raise typer.Exit


@app.callback()
def root_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Declare the options of the root command."""


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="outrider")
