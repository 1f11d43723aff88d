"""The command line.

Exit codes: 0 done, 1 a finding (something is not as it should be, or was not found), 2 invalid usage or settings, 3 a
server is unreachable. With `--json` a result is one JSON object or list on standard output, and an error one object on
standard error. A command that is done in part prints a result and an error.
"""

from __future__ import annotations

from typing import Annotated

import typer

import outrider
from outrider.cli import (
    audit,
    config,
    consume,
    db,
    dead_letters,
    demo,
    docs,
    doctor,
    events,
    explain,
    inbox,
    keys,
    relay,
    saga,
    schema,
)
from outrider.cli.output import Group

app = typer.Typer(
    name="outrider",
    cls=Group,
    help="Transactional outbox, inbox and sagas. If the transaction commits, its event is delivered, in order per key; "
    "at the other end, its effect happens once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("relay")(relay.relay)
app.command("consume")(consume.consume)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.command("lifecycle")(events.lifecycle)
app.command("demo")(demo.demo)
app.add_typer(config.app, name="config")
app.add_typer(db.app, name="db")
app.add_typer(events.app, name="events")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(dead_letters.app, name="dlq", hidden=True)
app.add_typer(inbox.app, name="inbox")
app.add_typer(saga.app, name="saga")
app.add_typer(audit.app, name="audit")
app.add_typer(schema.app, name="schema")
app.add_typer(docs.app, name="docs")
app.add_typer(keys.app, name="keys")


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
