"""`outrider db`: installs and upgrades the store, and switches its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from outrider.alembic import revision
from outrider.app import open_schema
from outrider.cli import journal
from outrider.cli.options import Json, StoreLocation, expand_options
from outrider.cli.output import CHECK_RESULT, emit, say, show_table
from outrider.errors import UsageError
from outrider.stores.migrations import Schema, SchemaStep

app = typer.Typer(help="Install and upgrade the store.", no_args_is_help=True)
Lanes = Annotated[
    int | None, typer.Option("--lanes", min=1, help="Lanes per band, fixed by the first install; 32 unless set.")
]


@app.command()
@expand_options
def migrate(*, location: StoreLocation, lanes: Lanes = None, json: Json = False) -> None:
    """Run the pending migrations. Safe to repeat, and to resume after a failure."""
    done = asyncio.run(_schema(location, lanes).migrate())
    if json:
        emit({"applied": [_facts(step) for step in done]})
        return
    for number, step in enumerate(done, start=1):
        say(f"[{number}/{len(done)}] {step.migration}: {step.name}")
    say(f"{len(done)} steps applied" if done else "nothing to do: the store is up to date")


@app.command()
@expand_options
def status(*, location: StoreLocation, json: Json = False) -> None:
    """Show the state of every migration. Exits with 1 while a migration is pending."""
    found = asyncio.run(_schema(location).status())
    rows: list[dict[str, Any]] = [
        {"version": m.version, "migration": m.migration, "state": m.state, "applied": m.applied, "steps": m.steps}
        for m in found
    ]
    ready = all(row["state"] == "applied" for row in rows)
    if json:
        emit({"ready": ready, "migrations": rows})
    else:
        show_table(["version", "migration", "state", "applied", "steps"], rows, empty="no migrations")
    if not ready:
        raise typer.Exit(CHECK_RESULT)


@app.command()
@expand_options
def plan(
    *,
    location: StoreLocation,
    sql: Annotated[bool, typer.Option("--sql", help="Show the statements too.")] = False,
    json: Json = False,
) -> None:
    """Show the steps that `migrate` would run; changes nothing."""
    steps = asyncio.run(_schema(location).plan())
    if json:
        emit({"steps": [{**_facts(step), "sql": step.sql} for step in steps]})
        return
    _show_plan(steps, sql)


@app.command("alembic")
def alembic(
    *,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write to this file.")] = None,
    revises: Annotated[
        str | None, typer.Option("--revises", help="The previous revision, as `alembic heads` shows it.")
    ] = None,
    after: Annotated[int, typer.Option("--after", min=0, help="The version of an earlier revision.")] = 0,
    schema: Annotated[str, typer.Option("--schema", help="The schema in PostgreSQL.")] = "outrider",
    lanes: Lanes = None,
    json: Json = False,
) -> None:
    """Print an Alembic revision that installs the store, for the `versions` folder."""
    identifier = uuid4().hex[-12:]
    text = revision(identifier, revises=revises, schema=schema, lanes=lanes, after=after)
    if output is not None:
        _create(output, text)
    if json:
        emit({"revision": identifier, "file": None if output is None else str(output), "text": text})
    else:
        say(text if output is None else f"wrote {output}; run: alembic upgrade head")


app.command("journal")(journal.journal)


def _create(output: Path, text: str) -> None:
    try:
        with output.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{output} is there already; name another file, or remove it first") from None
    except OSError as error:
        raise UsageError(f"cannot write {output} ({error.strerror}); check the path and its rights") from error


def _show_plan(steps: Sequence[SchemaStep], sql: bool) -> None:
    if not steps:
        say("nothing to do: the store is up to date")
    for step in steps:
        say(f"{step.migration}: {step.name}")
        if sql:
            say(f"{step.sql}\n")


def _facts(step: SchemaStep) -> dict[str, Any]:
    return {"version": step.version, "migration": step.migration, "step": step.name}


def _schema(location: StoreLocation, lanes: int | None = None) -> Schema:
    chosen = location.read()
    return open_schema(chosen.store_url(), schema=chosen.schema, lanes=lanes)
