"""`outrider schema`: registered schemas, and the check of all stored documents against new code."""

from __future__ import annotations

import asyncio
import json as jsonlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from outrider import app as composition
from outrider.cli.imports import find_payloads, find_sagas, imported
from outrider.cli.options import As, Json, StoreLocation, actor, expand_options
from outrider.cli.output import CHECK_RESULT, NotDone, emit, say, show_table
from outrider.cli.schema_check import StoredCheck, Unopened
from outrider.errors import NotFound, UsageError
from outrider.payload.model import PayloadSchema, parse_version, required_version
from outrider.payload.payloads import Payloads
from outrider.payload.schemas import compile_schema, make_schema, read_document
from outrider.payload.store import PayloadStore, RegisteredSchema

T = TypeVar("T")

app = typer.Typer(help="Register schemas, and check stored events before a deployment.", no_args_is_help=True)

COLUMNS = ("event_type", "version", "registered_at", "registered_by")

UNOPENED_COLUMNS = ("kind", "id", "name", "problem")

SHOWN_MAX = 1_000
"""The most documents that are listed; the others are counted."""

EventTypeArgument = Annotated[str, typer.Argument(metavar="EVENT_TYPE")]

VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", help="A whole number, or a text such as 2.1.0.")]


@app.command("register")
@expand_options
def register(
    event_type: EventTypeArgument,
    version: VersionArgument,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A JSON file, - for stdin, or module:Type of a model.")
    ],
    *,
    location: StoreLocation,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the schema of this version; events in flight see the change.")
    ] = False,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Keep the schema of an event type in the store, for `Payloads(schemas=stored_schemas(URL))`."""
    schema = make_schema(event_type, required_version(version, event_type), _document(source))
    compile_schema(schema)

    operator = actor(as_name, as_json=json)

    async def write(store: PayloadStore) -> bool:
        if replace:
            await store.replace(schema, operator)
            return True
        return await store.register(schema, operator) or await _is_same(store, schema)

    if not _with_payloads(location, write):
        raise NotDone(f"{schema.name} has another schema already; register a new version, or add --replace")
    emit({"registered": {"event_type": event_type, "version": schema.version}}) if json else say(
        f"{schema.name} is registered"
    )


@app.command("list")
@app.command("ls", hidden=True)
@expand_options
def list_schemas(*, location: StoreLocation, json: Json = False) -> None:
    """List registered schemas. Alias: `ls`."""
    rows = [_facts(each) for each in _with_payloads(location, lambda store: store.schemas())]
    emit(rows) if json else show_table(COLUMNS, rows, empty="no schemas are registered")


@app.command("show")
@expand_options
def show(event_type: EventTypeArgument, version: VersionArgument, *, location: StoreLocation) -> None:
    """Print a registered schema as JSON."""
    wanted = parse_version(version)
    for each in _with_payloads(location, lambda store: store.schemas(event_type)):
        if each.version == wanted:
            emit(each.document)
            return
    raise NotFound(f"{event_type} version {version} is not registered; see `outrider schema list`")


@app.command("check")
@expand_options
def check(
    *,
    location: StoreLocation,
    payloads: Annotated[
        str | None,
        typer.Option("--payloads", metavar="MODULE:NAME", help="The new payloads; else the setting `payloads`."),
    ] = None,
    sagas: Annotated[
        str | None, typer.Option("--sagas", metavar="MODULE:NAME", help="The new sagas, whose states are opened too.")
    ] = None,
    json: Json = False,
) -> None:
    """Open every stored event, message, reply and saga state with new code; exit 1 if one would not open.

    Run it before a deployment, with the new code and the old data. It reads in pages, and writes nothing.
    """
    registry = find_sagas(sagas) if sagas else None
    new = find_payloads(payloads or location.read().payloads) or (registry.payloads if registry else None)
    found = StoredCheck(new or Payloads(), registry)
    unopened = _with_payloads(location, lambda store: _checked(store, found, quiet=json))
    counts = {str(kind): count for kind, count in sorted(found.counts.items())}
    if json:
        rows = [each._asdict() for each in unopened[:SHOWN_MAX]]
        facts = {"checked": counts, "would_not_open": rows, "count": len(unopened)}
        emit({**facts, "unchecked": found.unchecked_sagas, "erased": found.erased})
    else:
        _say_result(found, unopened)
    if unopened:
        raise typer.Exit(CHECK_RESULT)


async def _checked(store: PayloadStore, check: StoredCheck, *, quiet: bool) -> list[Unopened]:
    await check.payloads.check()
    hidden = quiet or not sys.stderr.isatty()
    columns = TextColumn("{task.completed} documents checked")
    with Progress(columns, console=Console(stderr=True), disable=hidden, transient=True) as bar:
        task = bar.add_task("", total=None)
        return [each async for each in check.run(store, lambda count: bar.update(task, completed=count))]


def _say_result(check: StoredCheck, unopened: list[Unopened]) -> None:
    for each, count in check.counts.items():
        say(f"{count} checked: {each}")
    if check.unchecked_sagas:
        say(f"{check.unchecked_sagas} saga states are not checked; name the new sagas with --sagas module:sagas")
    if check.erased:
        say(f"{check.erased} belong to subjects that were erased, and are not checked")
    if unopened:
        rows = [each._asdict() for each in unopened[:SHOWN_MAX]]
        show_table(UNOPENED_COLUMNS, rows, empty="")
        say(f"{len(unopened)} would not open with the new code")
    else:
        say("everything opens with the new code")


def _with_payloads(location: StoreLocation, work: Callable[[PayloadStore], Awaitable[T]]) -> T:
    async def run() -> T:
        chosen = location.read()
        store = await composition.open_payloads(chosen.store_url(), schema=chosen.schema)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def _is_same(store: PayloadStore, schema: PayloadSchema) -> bool:
    known = await store.schemas(schema.event_type)
    return any(each.version == schema.version and each.document == schema.document for each in known)


def _document(source: str) -> Any:
    if source == "-":
        try:
            return jsonlib.loads(sys.stdin.read())
        except ValueError as error:
            raise UsageError(f"standard input is not JSON ({error})") from error
    if source.endswith(".json"):
        return read_document(Path(source))
    module, name = imported(source, "type", "shop.events:OrderPlaced")
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise UsageError(f"{source} is no type; name a model, or a file that ends in .json")
    return found


def _facts(each: RegisteredSchema) -> dict[str, Any]:
    return {name: value for name, value in each._asdict().items() if name != "document"}
