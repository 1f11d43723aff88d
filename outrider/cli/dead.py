"""`outrider dead`: look at dead letters, and decide about them."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from outrider.cli import selection
from outrider.cli.errors import Undone
from outrider.cli.events import without_payload
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
    Yes,
    actor,
    confirm,
    event_id,
    opened,
)
from outrider.cli.output import emit, say, show_facts, show_table
from outrider.cli.pace import in_steps
from outrider.cli.selection import All, Ids, Selection, WithReason
from outrider.errors import Misuse, NotFound
from outrider.outcome import Policy
from outrider.store import Criteria, Desk

app = typer.Typer(help="Look at dead letters, and decide about them.", no_args_is_help=True)
COLUMNS = ("event_id", "reason", "policy", "event_type", "topic", "key", "attempts", "buried_at")
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
Rate = Annotated[float | None, typer.Option("--rate", min=0.01, help="At most this many per second.")]


@app.command("ls")
def ls(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    topic: Topic = None,
    event_type: EventType = None,
    key: Key = None,
    reason: WithReason = None,
    group: Annotated[bool, typer.Option("--group", help="Count by reason and topic.")] = False,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List dead letters, in the order they would be replayed."""
    most = selection.MOST if group else limit
    criteria = Criteria(topic=topic, event_type=event_type, key=key, reason=selection.reason(reason), limit=most)
    rows = asyncio.run(_listed(Place(config, store, schema), criteria))
    if group:
        _show_groups(rows, json)
    else:
        emit(rows) if json else show_table(COLUMNS, rows, empty="no dead letters match")


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
    """Show one dead letter: why it failed, and what its stream does."""
    criteria = Criteria(event_ids=(event_id(id),), limit=1)
    rows = asyncio.run(_listed(Place(config, store, schema), criteria, payload=payload))
    if not rows:
        raise NotFound(f"no dead letter {id}; see `outrider dead ls`, or `outrider events show {id}`")
    emit(rows[0]) if json else show_facts(rows[0])


@app.command("replay")
def replay(
    ids: Ids = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    topic: Topic = None,
    event_type: EventType = None,
    key: Key = None,
    reason: WithReason = None,
    everything: All = False,
    dry_run: DryRun = False,
    rate: Rate = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Send dead letters again, in order. Name them, or choose them by filter."""
    chosen = Selection.of("replay", ids, topic=topic, event_type=event_type, key=key, why=reason, everything=everything)

    async def work(desk: Desk, rows: list[dict[str, Any]]) -> int:
        who = actor()
        return await in_steps([row["event_id"] for row in rows], rate, lambda some: desk.replay(some, who), quiet=json)

    _decide(
        Place(config, store, schema),
        chosen,
        selection.Decision("replay", "replayed", dry_run, yes, json, grave=not ids),
        work,
    )


@app.command("discard")
def discard(
    ids: Ids = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    topic: Topic = None,
    event_type: EventType = None,
    key: Key = None,
    reason: WithReason = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give dead letters up for good; held streams go on without them. It is recorded who did so."""
    chosen = Selection.of(
        "discard", ids, topic=topic, event_type=event_type, key=key, why=reason, everything=everything
    )

    async def work(desk: Desk, rows: list[dict[str, Any]]) -> int:
        who = actor()
        return await in_steps([row["event_id"] for row in rows], None, lambda some: desk.discard(some, who), quiet=json)

    _decide(
        Place(config, store, schema),
        chosen,
        selection.Decision("discard", "discarded", dry_run, yes, json, grave=True),
        work,
    )


@app.command("bury")
def bury(
    id: Annotated[str, typer.Argument(metavar="EVENT_ID")],
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    reason_text: Annotated[str, typer.Option("--reason-text", help="Why, for those who find it.")] = "by hand",
    policy: Annotated[str, typer.Option("--policy", help="hold: its stream waits; skip: its stream goes on.")] = "hold",
    json: Json = False,
) -> None:
    """Move an undelivered event to the dead letters."""
    wanted, chosen = event_id(id), _policy(policy)
    failure = {"kind": "by_hand", "error": reason_text, "at": datetime.now(UTC).isoformat()}

    async def buried() -> bool:
        async with opened(Place(config, store, schema)) as found:
            await found.desk.event(wanted)  # Says so if nobody has ever heard of it.
            return await found.desk.bury(wanted, actor(), failure, chosen)

    if not asyncio.run(buried()):
        raise Undone(f"{wanted} was not buried: it is no longer undelivered; see `outrider events show {wanted}`")
    emit({"buried": str(wanted), "policy": chosen}) if json else say(f"buried {wanted}; policy {chosen}")


async def _listed(place: Place, criteria: Criteria, *, payload: bool = False) -> list[dict[str, Any]]:
    async with opened(place) as found:
        rows = await found.desk.dead_letters(criteria)
    return rows if payload else [without_payload(row) for row in rows]


def _show_groups(rows: list[dict[str, Any]], json: bool) -> None:
    counted = Counter((str(row["reason"]), str(row["topic"])) for row in rows)
    groups = [{"reason": reason, "topic": topic, "count": count} for (reason, topic), count in counted.most_common()]
    emit(groups) if json else show_table(["reason", "topic", "count"], groups, empty="no dead letters match")


def _policy(text: str) -> Policy:
    try:
        return Policy(text)
    except ValueError:
        raise Misuse(f"{text!r} is not a policy; use hold (the stream waits) or skip (it goes on)") from None


def _decide(place: Place, chosen: Selection, decision: selection.Decision, work: selection.Work) -> None:
    rows = asyncio.run(_listed(place, chosen.criteria))
    if decision.dry_run:
        emit({f"would_{decision.verb}": rows}) if decision.json else show_table(COLUMNS, rows, empty="nothing matches")
    else:
        _do(place, rows, decision, work)
    chosen.complain(rows)


def _do(place: Place, rows: list[dict[str, Any]], decision: selection.Decision, work: selection.Work) -> None:
    if rows and decision.grave:
        confirm(f"{decision.verb} {_letters(len(rows))}", yes=decision.yes, as_json=decision.json)

    async def done() -> int:
        async with opened(place) as found:
            return await work(found.desk, rows) if rows else 0

    count = asyncio.run(done())
    emit({decision.done: count}) if decision.json else say(f"{_letters(count)} {decision.done}")


def _letters(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"
