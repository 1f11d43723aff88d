"""`outrider inbox`: what consumers could not handle, and what waits for it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer

from outrider import app as root
from outrider.cli.errors import Undone
from outrider.cli.options import ConfigFile, Json, Key, Limit, Place, SchemaName, StoreUrl, Topic, Yes, actor, confirm
from outrider.cli.output import emit, say, show_facts, show_table
from outrider.cli.selection import MOST, WithReason, reason
from outrider.delivery import InboxStream
from outrider.errors import Misuse, NotFound
from outrider.event import BAND_NAMES
from outrider.inbox_store import InboxCriteria, InboxDesk, InboxStore

app = typer.Typer(help="What consumers could not handle, and what waits for it.", no_args_is_help=True)
DEAD_COLUMNS = ("id", "consumer", "event_id", "reason", "policy", "event_type", "topic", "key", "attempts", "buried_at")
STREAM_COLUMNS = ("consumer", "topic", "key", "band", "cause", "seen", "waiting", "since")
ConsumerName = Annotated[str | None, typer.Option("--consumer", help="Only this consumer.")]
ID_MAX = 2**63 - 1
Ids = Annotated[
    list[int] | None,
    typer.Argument(metavar="[ID]...", min=1, max=ID_MAX, help="Which ones, by the id that `dead` shows."),
]
All = Annotated[bool, typer.Option("--all", help="All that match.")]
Band = Annotated[str, typer.Option("--band", help="high, normal or low.")]


@app.command("dead")
def dead(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    consumer: ConsumerName = None,
    topic: Topic = None,
    key: Key = None,
    why: WithReason = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List the dead letters of consumers, oldest first."""
    criteria = InboxCriteria(consumer=consumer, topic=topic, key=key, reason=reason(why), limit=limit)
    rows = [_without_bytes(row) for row in _ask(Place(config, store, schema), lambda desk: desk.dead_letters(criteria))]
    emit(rows) if json else show_table(DEAD_COLUMNS, rows, empty="no dead letters match")


@app.command("show")
def show(
    id: Annotated[int, typer.Argument(metavar="ID", min=1, max=ID_MAX)],
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    body: Annotated[
        bool, typer.Option("--body", help="Show headers and body too; as base64 if they are no text.")
    ] = False,
    json: Json = False,
) -> None:
    """Show one dead letter: why it could not be handled, and what came."""
    rows = _ask(Place(config, store, schema), lambda desk: desk.dead_letters(InboxCriteria(ids=(id,), limit=1)))
    if not rows:
        raise NotFound(f"no consumer has a dead letter {id}; see `outrider inbox dead`")
    facts = _with_text(rows[0]) if body else _without_bytes(rows[0])
    emit(facts) if json else show_facts(facts)


@app.command("replay")
def replay(
    ids: Ids = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    consumer: ConsumerName = None,
    topic: Topic = None,
    key: Key = None,
    why: WithReason = None,
    everything: All = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Let consumers handle dead letters again, each at its own place in its stream. A running consumer takes them."""
    criteria = InboxCriteria(tuple(ids or ()), consumer, topic, key, reason(why), MOST)
    _decide(Place(config, store, schema), "replay", "replayed", criteria, everything=everything, yes=yes, json=json)


@app.command("discard")
def discard(
    ids: Ids = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    consumer: ConsumerName = None,
    topic: Topic = None,
    key: Key = None,
    why: WithReason = None,
    everything: All = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give dead letters up for good; what waited behind them goes on. It is recorded who did so."""
    criteria = InboxCriteria(tuple(ids or ()), consumer, topic, key, reason(why), MOST)
    _decide(Place(config, store, schema), "discard", "discarded", criteria, everything=everything, yes=yes, json=json)


@app.command("streams")
def streams(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    consumer: ConsumerName = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List streams that wait: behind a dead letter (held), for a predecessor (early), or on their way (draining)."""
    rows = _ask(Place(config, store, schema), lambda desk: desk.streams(consumer, limit))
    named = [{**row, "band": BAND_NAMES[row["band"]]} for row in rows]
    emit(named) if json else show_table(STREAM_COLUMNS, named, empty="nothing waits")


@app.command("release")
def release(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    consumer: Annotated[str, typer.Option("--consumer", help="Whose stream.")],
    topic: Annotated[str, typer.Option("--topic", help="The stream's topic.")],
    key: Annotated[str, typer.Option("--key", help="The stream's key.")],
    band: Band = "normal",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Stop waiting for a predecessor that will not come: the stream goes on with the first event that waits."""
    if band not in BAND_NAMES:
        raise Misuse(f"{band!r} is not a band; use {', '.join(BAND_NAMES)}")
    confirm(f"give up on the missing events of {key} on {topic}", yes=yes, as_json=json)
    stream = InboxStream(topic, key, BAND_NAMES.index(band))
    if not _ask(Place(config, store, schema), lambda desk: desk.release(consumer, stream, actor())):
        raise Undone(f"{consumer} is not waiting for a predecessor of {key} on {topic}; see `outrider inbox streams`")
    emit({"released": key}) if json else say(f"{key} on {topic} goes on")


def _decide(
    place: Place, verb: str, done: str, criteria: InboxCriteria, *, everything: bool, yes: bool, json: bool
) -> None:
    filters = (criteria.consumer, criteria.topic, criteria.key, criteria.reason)
    if sum((bool(criteria.ids), any(value is not None for value in filters), everything)) != 1:
        raise Misuse(
            f"say which dead letters to {verb}, in one way: ids, or filters (--consumer, --topic, --key, --reason), or "
            "--all; `outrider inbox dead` shows what there is"
        )
    rows = _ask(place, lambda desk: desk.dead_letters(criteria))
    found = [row["id"] for row in rows]
    if found and (verb == "discard" or not criteria.ids):
        confirm(f"{verb} {_letters(len(found))}", yes=yes, as_json=json)
    count = _ask(place, lambda desk: getattr(desk, verb)(found, actor())) if found else 0
    told = "will be handled by the next running consumer" if verb == "replay" else done
    emit({done: count}) if json else say(f"{_letters(count)} {told}")
    if missing := sorted(set(criteria.ids) - set(found)):
        raise Undone(f"no such dead letter: {', '.join(map(str, missing))}; see `outrider inbox dead`")
    if len(found) == MOST:
        raise Undone(f"only the first {MOST} were taken on; run the command again for the rest")


def _ask(place: Place, question: Callable[[InboxDesk], Awaitable[Any]]) -> Any:
    async def asked() -> Any:
        async with _opened(place) as store:
            return await question(store.desk)

    return asyncio.run(asked())


@asynccontextmanager
async def _opened(place: Place) -> AsyncIterator[InboxStore]:
    chosen = place.read()
    store = await root.open_inbox(chosen.store_url(), schema=chosen.schema)
    try:
        yield store
    finally:
        await store.close()


def _without_bytes(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("headers", "body")}


def _with_text(row: dict[str, Any]) -> dict[str, Any]:
    headers = {name: _text(value) for name, value in row["headers"].items()}
    return {**row, "headers": headers, "body": _text(row["body"])}


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(raw).decode()}"


def _letters(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"
