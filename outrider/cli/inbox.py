"""`outrider inbox`: dead letters of consumers, and streams with held events."""

from __future__ import annotations

import base64
import json as json_codec
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.imports import find_payloads
from outrider.cli.keys import opened
from outrider.cli.options import (
    As,
    Consent,
    ConsumerName,
    Decision,
    InboxFilter,
    Json,
    Limit,
    StoreLocation,
    Yes,
    actor,
    confirm,
    expand_options,
    reason_of,
    with_inbox,
)
from outrider.cli.output import NotDone, emit, say, show_facts, show_table
from outrider.errors import NotFound, UsageError
from outrider.event import BAND_NAMES, InboxStream
from outrider.inbox.model import InboxCriteria

app = typer.Typer(help="Dead letters of consumers, and streams with held events.", no_args_is_help=True)

LISTING = "outrider inbox list"

COLUMNS = (
    *("id", "consumer", "event_id", "reason", "policy", "event_type", "topic", "key", "attempts"),
    "dead_lettered_at",
)

STREAM_COLUMNS = ("consumer", "topic", "key", "band", "cause", "seen", "waiting", "since")

ID_MAX = 2**63 - 1

Ids = Annotated[
    list[int] | None,
    typer.Argument(metavar="[ID]...", min=1, max=ID_MAX, help="Dead letters by id, as `list` shows them."),
]


@app.command("list")
@app.command("ls", hidden=True)
@expand_options
def list_dead_letters(*, location: StoreLocation, matching: InboxFilter, limit: Limit = 50, json: Json = False) -> None:
    """List the dead letters of consumers, oldest first. Alias: `ls`."""
    found = _find(location, _criteria((), matching, limit))
    rows = [{**_without_bytes(row), "failure": _split_traceback(row)[0]} for row in found]
    emit(rows) if json else show_table(COLUMNS, rows, empty="no dead letters match")


@app.command("show")
@expand_options
def show(
    id: Annotated[int, typer.Argument(metavar="ID", min=1, max=ID_MAX)],
    *,
    location: StoreLocation,
    body: Annotated[
        bool,
        typer.Option("--body", help="Show headers and body too, decrypted with the keys; as base64 if no text."),
    ] = False,
    json: Json = False,
) -> None:
    """Show one dead letter of a consumer: the failure with its traceback, and with `--body` the message."""
    rows = _find(location, InboxCriteria(ids=(id,), limit=1))
    if not rows:
        raise NotFound(f"no consumer has a dead letter {id}; see `{LISTING}`")
    facts = _with_text(_decrypted(location, rows[0])) if body else _without_bytes(rows[0])
    if json:
        emit(facts)
        return
    failure, traceback = _split_traceback(facts)
    show_facts({**facts, "failure": failure})
    if traceback:
        say(f"\n{traceback}")


@app.command("replay")
@expand_options
def replay(ids: Ids = None, *, location: StoreLocation, matching: InboxFilter, consent: Consent) -> None:
    """Let consumers handle dead letters again, at their positions in their streams. A running consumer takes them."""
    criteria = _criteria(ids or (), matching, options.CHOSEN_MAX)
    text = "will be handled by the next running consumer"
    decision = Decision("replay", "replayed", LISTING, criteria.ids, matching, consent, "id", text)
    decision.apply(
        lambda: _find(location, criteria),
        lambda chosen: with_inbox(
            location, lambda store: store.admin.replay(chosen, actor(consent.as_name, as_json=consent.json))
        ),
    )


@app.command("discard")
@expand_options
def discard(ids: Ids = None, *, location: StoreLocation, matching: InboxFilter, consent: Consent) -> None:
    """Delete dead letters for good; held events behind them go on. The operations log names the operator."""
    criteria = _criteria(ids or (), matching, options.CHOSEN_MAX)
    decision = Decision("discard", "discarded", LISTING, criteria.ids, matching, consent, "id")
    decision.apply(
        lambda: _find(location, criteria),
        lambda chosen: with_inbox(
            location, lambda store: store.admin.discard(chosen, actor(consent.as_name, as_json=consent.json))
        ),
    )


@app.command("streams")
@expand_options
def streams(*, location: StoreLocation, consumer: ConsumerName = None, limit: Limit = 50, json: Json = False) -> None:
    """List streams with held events: behind a dead letter, early (a predecessor is missing) or draining."""
    rows = with_inbox(location, lambda store: store.admin.streams(consumer, limit))
    named = [{**row, "band": BAND_NAMES[row["band"]]} for row in rows]
    emit(named) if json else show_table(STREAM_COLUMNS, named, empty="no stream has held events")


@app.command("skip-gap")
@expand_options
def skip_gap(
    *,
    location: StoreLocation,
    consumer: Annotated[str, typer.Option("--consumer", help="The consumer.")],
    topic: Annotated[str, typer.Option("--topic", help="The stream's topic.")],
    key: Annotated[str, typer.Option("--key", help="The stream's key.")],
    band: Annotated[str, typer.Option("--band", help="high, normal or low.")] = "normal",
    yes: Yes = False,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Stop waiting for a missing predecessor: the stream goes on with its first held event."""
    if band not in BAND_NAMES:
        raise UsageError(f"{band!r} is not a band; use {', '.join(BAND_NAMES)}")
    confirm(f"give up on the missing events of {key} on {topic}", yes=yes, as_json=json)
    stream = InboxStream(topic, key, BAND_NAMES.index(band))
    if not with_inbox(location, lambda store: store.admin.skip_gap(consumer, stream, actor(as_name, as_json=json))):
        raise NotDone(f"{consumer} is not waiting for a predecessor of {key} on {topic}; see `outrider inbox streams`")
    emit({"skipped_gap": key}) if json else say(f"{key} on {topic} continues")


def _criteria(ids: Sequence[int], matching: InboxFilter, limit: int) -> InboxCriteria:
    consumer, topic, key, reason = matching
    return InboxCriteria(tuple(dict.fromkeys(ids)), consumer, topic, key, reason_of(reason), limit)


def _find(location: StoreLocation, criteria: InboxCriteria) -> list[dict[str, Any]]:
    return with_inbox(location, lambda store: store.admin.dead_letters(criteria))


def _split_traceback(row: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the failure of a dead letter without its traceback, and the traceback, which has many lines."""
    failure = dict(row["failure"])
    return failure, failure.pop("traceback", None)


def _without_bytes(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("headers", "body")}


def _decrypted(location: StoreLocation, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the body as a person reads it. A body that is no JSON stays as it is."""
    payloads = find_payloads(location.read().payloads)
    try:
        payload = json_codec.loads(row["body"])
    except (ValueError, RecursionError):
        return row
    plain = opened(payloads, row, payload)
    return row if plain is payload else {**row, "body": json_codec.dumps(plain, ensure_ascii=False).encode()}


def _with_text(row: dict[str, Any]) -> dict[str, Any]:
    headers = {name: _text(value) for name, value in row["headers"].items()}
    return {**row, "headers": headers, "body": _text(row["body"])}


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(raw).decode()}"
