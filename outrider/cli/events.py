"""`outrider events`: events in the outbox and in the archive; `outrider lifecycle`: their states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from outrider.cli.keys import with_plain_payload
from outrider.cli.options import (
    EventId,
    EventType,
    Json,
    Key,
    Limit,
    StoreLocation,
    Topic,
    WithPayload,
    event_id,
    expand_options,
    one_of,
    with_outbox,
)
from outrider.cli.output import emit, say, show_facts, show_table
from outrider.errors import UsageError
from outrider.outbox.model import STORED, TRANSITIONS, Criteria, State, allowed, mermaid
from outrider.redaction import masked_headers

app = typer.Typer(help="List and show events.", no_args_is_help=True)

COLUMNS = ("event_id", "state", "event_type", "topic", "key", "sequence", "attempts", "created_at")

LISTED = (*STORED, State.SENT)


@app.command("list")
@app.command("ls", hidden=True)
@expand_options
def list_events(
    *,
    location: StoreLocation,
    state: Annotated[str | None, typer.Option("--state", help="Only this state; `sent` lists the archive.")] = None,
    topic: Topic = None,
    event_type: EventType = None,
    key: Key = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List undelivered events, oldest first; with `--state sent`, delivered events, newest first. Alias: `ls`."""
    if state == State.DEAD_LETTER:
        raise UsageError("dead letters have a list of their own; run `outrider dead-letters list`")
    wanted = one_of(state, LISTED, "a state to list")
    criteria = Criteria(state=wanted, event_type=event_type, topic=topic, key=key, limit=limit)
    rows = [without_payload(row) for row in with_outbox(location, lambda store: store.admin.events(criteria))]
    emit(rows) if json else show_table(COLUMNS, rows, empty="no events match")


@app.command("show")
@expand_options
def show(id: EventId, *, location: StoreLocation, payload: WithPayload = False, json: Json = False) -> None:
    """Show one event, from the outbox, the archive or the dead letters. With the keys, `--payload` decrypts."""
    wanted = event_id(id)
    facts = with_outbox(location, lambda store: store.admin.event(wanted))
    shown = with_plain_payload(location, facts) if payload else without_payload(facts)
    emit(shown) if json else show_facts(shown)


def without_payload(facts: dict[str, Any]) -> dict[str, Any]:
    """Leave the payload out, and mask the application's headers: a terminal's history should not keep them."""
    shown = {name: value for name, value in facts.items() if name != "payload"}
    if isinstance(headers := shown.get("headers"), Mapping):
        shown["headers"] = masked_headers(headers)
    return shown


def lifecycle(
    state: Annotated[str | None, typer.Argument(help="Show only the transitions out of this state.")] = None,
    diagram: Annotated[bool, typer.Option("--mermaid", help="Draw a Mermaid diagram.")] = False,
    json: Json = False,
) -> None:
    """Show the states of an event and the transitions between them."""
    if state is not None:
        one_of(state, State, "a state of an event")
        _show_next(State(state), json)
    elif diagram:
        emit({"mermaid": mermaid()}) if json else say(mermaid())
    else:
        _show_all(json)


def _show_all(json: bool) -> None:
    rows = [
        {"transition": name, "from": list(transition.sources), "to": transition.target, "when": transition.description}
        for name, transition in TRANSITIONS.items()
    ]
    if json:
        emit(rows)
        return
    shown = [{**row, "from": ", ".join(row["from"]) or "(new)"} for row in rows]
    show_table(["transition", "from", "to", "when"], shown, empty="no transitions")


def _show_next(state: State, json: bool) -> None:
    following = allowed(state)
    if json:
        emit({"state": state, "allowed": following})
        return
    rows = [
        {"transition": name, "to": target, "when": TRANSITIONS[name].description} for name, target in following.items()
    ]
    show_table(["transition", "to", "when"], rows, empty=f"{state} is final: no transition leaves it")
