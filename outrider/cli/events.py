"""`outrider events`: look at events wherever they are."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from outrider.cli.options import (
    ConfigFile,
    EventType,
    Json,
    Key,
    Limit,
    Place,
    SchemaName,
    StoreUrl,
    Topic,
    WithPayload,
    event_id,
    opened,
)
from outrider.cli.output import emit, show_facts, show_table
from outrider.config import nearest
from outrider.errors import Misuse
from outrider.lifecycle import STORED, State
from outrider.store import Criteria

app = typer.Typer(help="Look at events.", no_args_is_help=True)
COLUMNS = ("event_id", "state", "event_type", "topic", "key", "sequence", "attempts", "created_at")
LISTED = (*STORED, State.SENT)


@app.command("ls")
def ls(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    state: Annotated[str | None, typer.Option("--state", help="Only this state; `sent` lists the archive.")] = None,
    topic: Topic = None,
    event_type: EventType = None,
    key: Key = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List undelivered events, oldest first; with `--state sent`, delivered ones, newest first."""
    criteria = Criteria(state=_state(state), event_type=event_type, topic=topic, key=key, limit=limit)

    async def listed() -> list[dict[str, Any]]:
        async with opened(Place(config, store, schema)) as desk_of:
            return await desk_of.desk.events(criteria)

    rows = [without_payload(row) for row in asyncio.run(listed())]
    emit(rows) if json else show_table(COLUMNS, rows, empty="no events match")


@app.command("show")
def show(
    id: Annotated[str, typer.Argument(metavar="EVENT_ID")],
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    payload: WithPayload = False,
    json: Json = False,
) -> None:
    """Show all that is known of one event: in the outbox, the archive or the dead letters."""
    wanted = event_id(id)

    async def found() -> dict[str, Any]:
        async with opened(Place(config, store, schema)) as desk_of:
            return await desk_of.desk.event(wanted)

    facts = asyncio.run(found())
    shown = facts if payload else without_payload(facts)
    emit(shown) if json else show_facts(shown)


def without_payload(facts: dict[str, Any]) -> dict[str, Any]:
    """Leave the payload out: it may hold what a terminal's history should not."""
    return {name: value for name, value in facts.items() if name != "payload"}


def _state(text: str | None) -> str | None:
    if text is None or text in LISTED:
        return text
    if text == State.DEAD_LETTER:
        raise Misuse("dead letters have a list of their own; run `outrider dead ls`")
    hint = f"did you mean {near}? " if (near := nearest(text, LISTED)) else ""
    raise Misuse(f"{text!r} is not a state to list; {hint}(valid: {', '.join(LISTED)})")
