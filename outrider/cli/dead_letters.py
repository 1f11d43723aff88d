"""`outrider dead-letters`: lists, edits, replays and discards events that the relay could not publish."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.progress import Progress

from outrider.cli import options
from outrider.cli.events import without_payload
from outrider.cli.imports import find_payloads
from outrider.cli.keys import with_plain_payload
from outrider.cli.options import (
    As,
    Consent,
    DeadLetterFilter,
    Decision,
    EventId,
    Json,
    Limit,
    StoreLocation,
    WithPayload,
    actor,
    event_id,
    event_ids,
    expand_options,
    reason_of,
    with_outbox,
)
from outrider.cli.output import NotDone, emit, say, show_facts, show_table
from outrider.errors import NotFound, UsageError
from outrider.event import OnDeadLetter, is_erased
from outrider.outbox.model import Criteria
from outrider.outbox.store import OutboxStore
from outrider.outbox.validation import StagingRules, validate_edit

app = typer.Typer(help="List, edit, replay and discard dead letters. Alias: `dlq`.", no_args_is_help=True)

LISTING = "outrider dead-letters list"

COLUMNS = ("event_id", "reason", "policy", "event_type", "topic", "key", "attempts", "dead_lettered_at")

Ids = Annotated[list[str] | None, typer.Argument(metavar="[EVENT_ID]...", help="Dead letters by event id.")]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the dead letters that would be chosen.")]

Rate = Annotated[float | None, typer.Option("--rate", min=0.01, help="At most this many per second.")]

STEP_MAX = 500

GROUPS_MAX = 1000

BATCHES_PER_SECOND = 10


@app.command("list")
@app.command("ls", hidden=True)
@expand_options
def list_dead_letters(
    *, location: StoreLocation, matching: DeadLetterFilter, limit: Limit = 50, json: Json = False
) -> None:
    """List dead letters in the order of their replay. Alias: `ls`."""
    rows = _find(location, _criteria((), matching, limit))
    emit(rows) if json else show_table(COLUMNS, rows, empty="no dead letters match")


@app.command("show")
@expand_options
def show(id: EventId, *, location: StoreLocation, payload: WithPayload = False, json: Json = False) -> None:
    """Show one dead letter: its reason, its last failure, and its policy. With the keys, `--payload` decrypts."""
    rows = _find(location, Criteria(event_ids=(event_id(id),), limit=1), payload=payload)
    if not rows:
        raise NotFound(f"no dead letter {id}; see `{LISTING}`, or `outrider events show {id}`")
    shown = with_plain_payload(location, rows[0]) if payload else rows[0]
    emit(shown) if json else show_facts(shown)


@app.command("groups")
@expand_options
def groups(*, location: StoreLocation, matching: DeadLetterFilter, json: Json = False) -> None:
    """Count dead letters by reason and topic; the 1,000 largest groups are shown."""
    criteria = _criteria((), matching, GROUPS_MAX)
    found = with_outbox(location, lambda store: store.admin.dead_letter_groups(criteria))
    emit(found) if json else show_table(["reason", "topic", "count"], found, empty="no dead letters match")


@app.command("add")
@expand_options
def add(
    id: EventId,
    *,
    location: StoreLocation,
    reason_text: Annotated[str, typer.Option("--reason-text", help="The reason, for other operators.")] = "by hand",
    policy: Annotated[
        str, typer.Option("--policy", help="block: its stream waits; skip: its stream continues.")
    ] = "block",
    as_name: As = None,
    json: Json = False,
) -> None:
    """Move an undelivered event to the dead letters."""
    wanted, chosen = event_id(id), _policy(policy)
    failure = {"kind": "by_hand", "error": reason_text, "at": datetime.now(UTC).isoformat()}

    async def dead_letter_event(store: OutboxStore) -> bool:
        await store.admin.event(wanted)  # Raises NotFound for an id that no table holds.
        moved = await store.admin.dead_letter(wanted, actor(as_name, as_json=json), failure, chosen)
        await store.notify()
        return moved

    if not with_outbox(location, dead_letter_event):
        raise NotDone(f"{wanted} was not moved: it is no longer undelivered; see `outrider events show {wanted}`")
    emit({"dead_lettered": str(wanted), "policy": chosen}) if json else say(
        f"{wanted} is a dead letter; policy {chosen}"
    )


@app.command("edit")
@expand_options
def edit(
    id: EventId,
    *,
    location: StoreLocation,
    payload_file: Annotated[
        Path | None, typer.Option("--payload-file", metavar="FILE", help="The new payload as JSON; - reads stdin.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="Set this header; may be repeated.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", help="The new topic; the event leaves its stream, which then continues.")
    ] = None,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Change payload, headers or topic of a dead letter before its replay. The operations log names the operator."""
    if payload_file is None and not header and topic is None:
        raise UsageError("say what to change: --payload-file FILE, --header NAME=VALUE or --topic TOPIC")
    wanted, payload, headers = event_id(id), _read_payload(payload_file), _read_headers(header or ())
    rules = StagingRules(payloads=find_payloads(location.read().payloads))

    async def changed(store: OutboxStore) -> bool:
        for dead_letter in await store.admin.dead_letters(Criteria(event_ids=(wanted,), limit=1)):
            valid = validate_edit(dead_letter, rules, payload=payload, headers=headers, topic=topic)
            done = await store.admin.edit(wanted, actor(as_name, as_json=json), valid)
            await store.notify()
            return done
        return False

    if not with_outbox(location, changed):
        raise NotFound(f"no dead letter {id}; see `{LISTING}`, or `outrider events show {id}`")
    emit({"edited": str(wanted)}) if json else say(f"{wanted} is changed; next: outrider dead-letters replay {wanted}")


@app.command("replay")
@expand_options
def replay(
    ids: Ids = None,
    *,
    location: StoreLocation,
    matching: DeadLetterFilter,
    dry_run: DryRun = False,
    rate: Rate = None,
    consent: Consent,
) -> None:
    """Send dead letters again, in order. Choose them by id, by filter or with `--all`."""
    chosen = _criteria(event_ids(ids), matching, options.CHOSEN_MAX)
    decision = Decision("replay", "replayed", LISTING, chosen.event_ids, matching, consent)
    if dry_run:
        _show_chosen(location, chosen, decision)
        return

    async def send(store: OutboxStore, found: list[UUID]) -> int:
        operator = actor(consent.as_name, as_json=consent.json)

        async def replay_batch(batch: Sequence[UUID]) -> int:
            replayed = await store.admin.replay(batch, operator)
            await store.notify()
            return replayed

        return await in_batches(found, rate, replay_batch, quiet=consent.json)

    decision.apply(
        lambda: _whole(_find(location, chosen, payload=True)),
        lambda found: with_outbox(location, lambda store: send(store, found)),
    )


@app.command("discard")
@expand_options
def discard(
    ids: Ids = None,
    *,
    location: StoreLocation,
    matching: DeadLetterFilter,
    dry_run: DryRun = False,
    consent: Consent,
) -> None:
    """Delete dead letters for good; their blocked streams continue. The operations log names the operator."""
    chosen = _criteria(event_ids(ids), matching, options.CHOSEN_MAX)
    decision = Decision("discard", "discarded", LISTING, chosen.event_ids, matching, consent)
    if dry_run:
        _show_chosen(location, chosen, decision)
        return

    async def remove(store: OutboxStore, found: list[UUID]) -> int:
        operator = actor(consent.as_name, as_json=consent.json)
        discarded = await in_batches(
            found, None, lambda batch: store.admin.discard(batch, operator), quiet=consent.json
        )
        # The streams that a discarded event has blocked continue.
        await store.notify()
        return discarded

    decision.apply(
        lambda: _find(location, chosen), lambda found: with_outbox(location, lambda store: remove(store, found))
    )


def _criteria(ids: tuple[UUID, ...], matching: DeadLetterFilter, limit: int) -> Criteria:
    topic, event_type, key, reason = matching
    return Criteria(ids, None, event_type, topic, key, reason_of(reason), limit)


def _find(location: StoreLocation, criteria: Criteria, *, payload: bool = False) -> list[dict[str, Any]]:
    rows = with_outbox(location, lambda store: store.admin.dead_letters(criteria))
    return rows if payload else [without_payload(row) for row in rows]


def _whole(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return dead letters that can be sent again. The payload of an erased one is gone."""
    if erased := [str(row["event_id"]) for row in rows if is_erased(row["payload"])]:
        names = ", ".join(erased[:3]) + (f" and {len(erased) - 3} more" if len(erased) > 3 else "")
        raise NotDone(f"the subject of {names} was erased, so nothing is left to send; discard what was erased first")
    return rows


def _show_chosen(location: StoreLocation, criteria: Criteria, decision: Decision) -> None:
    decision.check()
    rows = _find(location, criteria)
    if decision.consent.json:
        emit({f"would_{decision.command}": rows})
    else:
        show_table(COLUMNS, rows, empty="no dead letters match")
    decision.report_missing([row["event_id"] for row in rows])


def _read_payload(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path and its rights") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8; save it as UTF-8") from None


def _read_headers(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if wrong := [name for name, separator, _ in pairs if not separator]:
        raise UsageError(f"--header {wrong[0]!r} has no value; write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _policy(text: str) -> OnDeadLetter:
    try:
        return OnDeadLetter(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a policy; use block (the stream waits) or skip (it goes on)") from None


async def in_batches(
    ids: Sequence[UUID], rate: float | None, action: Callable[[Sequence[UUID]], Awaitable[int]], *, quiet: bool
) -> int:
    """Act on the ids in steps, not faster than the rate; return the sum. A terminal shows the progress."""
    done, started = 0, time.monotonic()
    with Progress(console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=len(ids))
        for start, step in steps(ids, rate):
            if rate is not None:
                await asyncio.sleep(max(0.0, started + start / rate - time.monotonic()))
            done += await action(step)
            bar.advance(task, len(step))
    return done


def steps(ids: Sequence[UUID], rate: float | None) -> Iterator[tuple[int, Sequence[UUID]]]:
    """Split ids into steps with their offsets; a rate makes the steps small."""
    size = STEP_MAX if rate is None else max(1, min(STEP_MAX, int(rate / BATCHES_PER_SECOND)))
    for start in range(0, len(ids), size):
        yield start, ids[start : start + size]
