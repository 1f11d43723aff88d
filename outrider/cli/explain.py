"""`outrider explain`: explains the position of an event, a key or a saga, and suggests commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import typer
import typer.main

from outrider.cli import saga
from outrider.cli.events import without_payload
from outrider.cli.options import CHOSEN_MAX, Json, StoreLocation, expand_options, with_inbox, with_outbox, with_sagas
from outrider.cli.output import cell, emit, say
from outrider.errors import NotFound
from outrider.event import BAND_NAMES, OnDeadLetter, default_topic
from outrider.outbox.model import FETCHABLE, BlockedStream, BlockReason, Criteria, State
from outrider.outbox.store import OutboxAdmin
from outrider.saga.definition.saga import saga_id_of
from outrider.saga.explain import Suggestion

SHOWN_MAX = 1_000
"""The maximum of events that are read for a key."""

RELAY = Suggestion("outrider relay", "publishes the events in the outbox; it needs the same --store, and the --broker")


@expand_options
def explain(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="An event id, a key, a saga's id or TYPE/CORRELATION_ID.")
    ],
    *,
    location: StoreLocation,
    json: Json = False,
) -> None:
    """Say in plain words where an event, a key or a saga is, why it is there, and which command helps."""
    if (saga_id := _find_saga(location, what)) is not None:
        given = [f"--{name}={value}" for name, value in location._asdict().items() if value is not None]
        given += ["--json"] if json else []
        typer.main.get_command(saga.app).main(["why", str(saga_id), *given], standalone_mode=False)
        return
    found = _find_event(location, what) or _find_key(location, what)
    if found is None:
        raise NotFound(
            f"{what} is no event, key or saga of this store; events are deleted after their retention, "
            "see `outrider events list --state sent`"
        )
    if json:
        emit({**found._asdict(), "helps": [help_._asdict() for help_ in found.helps]})
        return
    say(found.summary)
    for reason in found.reasons:
        say(f"- {reason}")
    if found.helps:
        say("what helps")
    for command, effect in found.helps:
        say(f"  {command}  {effect}")


class OutboxExplanation(NamedTuple):
    """The explanation of an event or of a key: reasons, the most important first, and suggested commands."""

    kind: str
    id: str
    summary: str
    reasons: list[str]
    helps: list[Suggestion]
    facts: dict[str, Any]


class StreamReport(NamedTuple):
    """A stream of the outbox. `head` is the blocking event or dead letter."""

    lane: int | None
    topic: str
    key: str
    relays: int
    owner: str | None
    block: BlockedStream | None
    head: dict[str, Any] | None


def _find_saga(location: StoreLocation, what: str) -> UUID | None:
    saga_type, separator, correlation_id = what.partition("/")
    saga_id = saga_id_of(saga_type, correlation_id) if separator else _uuid(what)
    if saga_id is None:
        return None
    record = with_sagas(location, lambda store: store.admin.show(saga_id))
    return saga_id if record else None


def _find_event(location: StoreLocation, what: str) -> OutboxExplanation | None:
    event_id = _uuid(what)
    if event_id is None:
        return None
    with suppress(NotFound):
        return with_outbox(location, lambda store: explain_event(store.admin, event_id))
    return None


def _find_key(location: StoreLocation, key: str) -> OutboxExplanation | None:
    found = with_outbox(location, lambda store: explain_key(store.admin, key))
    rows = with_inbox(location, lambda store: store.admin.streams(None, CHOSEN_MAX))
    streams = [row for row in rows if row["key"] == key]
    if found is None and not streams:
        return None
    reasons, helps, facts = (found.reasons, found.helps, found.facts) if found else ([], [], {})
    summary = found.summary if found else f"the key {key} has no event in the outbox"
    inbox_reasons = [_consumer_reason(row) for row in streams]
    inbox_helps = [help_ for row in streams for help_ in _consumer_helps(row)]
    return OutboxExplanation(
        "key", key, summary, [*reasons, *inbox_reasons], [*helps, *inbox_helps], {**facts, "inbox_streams": streams}
    )


async def explain_event(admin: OutboxAdmin, event_id: UUID) -> OutboxExplanation:
    """Explain an event; raises NotFound for an unknown id."""
    event = await admin.event(event_id)
    report = await _report(admin, event.get("lane"), _topic(event), event["key"])
    state = State(event["state"])
    summary = f"{event['event_type']} {event_id} of {event['key']} on {report.topic} is {state}"
    reasons, helps = list(_event_reasons(event, state, report)), list(_event_helps(event, state, report))
    facts = {"event": without_payload(event), "relays": report.relays, "lane_owner": report.owner}
    return OutboxExplanation(
        "event", str(event_id), summary, reasons, helps, {**facts, "blocked": _block_facts(report)}
    )


async def explain_key(admin: OutboxAdmin, key: str) -> OutboxExplanation | None:
    """Explain the streams of a key; None for a key without events."""
    criteria = Criteria(key=key, limit=SHOWN_MAX)
    events, dead = await admin.events(criteria), await admin.dead_letters(criteria)
    blocked = [block for block in await admin.blocked_streams(CHOSEN_MAX) if block.stream.key == key]
    names = {(event.get("lane"), _topic(event)) for event in (*events, *dead)}
    names |= {(block.stream.lane, block.stream.topic) for block in blocked}
    if not names:
        sent = await admin.events(Criteria(state=State.SENT, key=key, limit=1))
        if not sent:
            return None
        last = f"the last one, {sent[0]['event_type']} {sent[0]['event_id']}, was sent at {cell(sent[0]['sent_at'])}"
        return OutboxExplanation("key", key, f"all events of {key} are delivered", [last], [], {"streams": []})
    reports = [await _report(admin, lane, topic, key) for lane, topic in sorted(names, key=str)]
    reasons: list[str] = []
    helps: dict[Suggestion, None] = {}
    for report in reports:
        counted = Counter(str(e["state"]) for e in (*events, *dead) if (e.get("lane"), _topic(e)) == report[:2])
        listed = ", ".join(f"{count} {state}" for state, count in counted.items()) or "no events"
        reasons += [f"{report.topic}: {listed}", *_stream_reasons(report)]
        helps |= dict.fromkeys([*_block_helps(report), *_relay_helps(report)])
    state = "is blocked" if any(report.block for report in reports) else "is not blocked"
    facts = {"streams": [{"lane": r.lane, "topic": r.topic, "blocked": _block_facts(r)} for r in reports]}
    return OutboxExplanation("key", key, f"the key {key} {state}", reasons, list(helps), facts)


async def _report(admin: OutboxAdmin, lane: int | None, topic: str, key: str) -> StreamReport:
    owner = None if lane is None else await admin.lane_owner(lane)
    blocked = await admin.blocked_streams(CHOSEN_MAX)
    block = next((each for each in blocked if each.stream == (lane, topic, key)), None)
    head = await _head(admin, block) if block else None
    return StreamReport(lane, topic, key, await admin.relays(), owner, block, head)


async def _head(admin: OutboxAdmin, block: BlockedStream) -> dict[str, Any] | None:
    criteria = Criteria(topic=block.stream.topic, key=block.stream.key, limit=SHOWN_MAX)
    if block.cause == BlockReason.DEAD_LETTER:
        rows = [row for row in await admin.dead_letters(criteria) if row["policy"] == OnDeadLetter.BLOCK]
    else:
        rows = [row for row in await admin.events(criteria) if row["state"] not in FETCHABLE]
    return next((row for row in rows if row.get("lane") == block.stream.lane), None)


def _event_reasons(event: dict[str, Any], state: State, report: StreamReport) -> Iterator[str]:
    error = (event.get("failure") or {}).get("error")
    if state is State.SENT:
        yield f"the broker confirmed it at {cell(event['sent_at'])}; nothing more happens here"
    elif state is State.DEAD_LETTER:
        yield f"dead-lettered at {cell(event['dead_lettered_at'])} after {_attempts(event)}: {event['reason']}"
        yield from [f"the last failure: {error}"] if error else []
        blocks = event["policy"] == OnDeadLetter.BLOCK
        yield "its stream waits until a person decides" if blocks else "its stream went on without it"
    else:
        yield from [f"the last failure: {error}"] if error else []
        yield from _undelivered_reasons(event, state, report)
        yield _relay_reason(report)


def _undelivered_reasons(event: dict[str, Any], state: State, report: StreamReport) -> Iterator[str]:
    is_head = report.head is not None and report.head["event_id"] == event["event_id"]
    due = f"due {cell(report.block.due_at)}" if report.block and report.block.due_at else "due as soon as a relay runs"
    available_at = event.get("available_at")
    early = available_at is not None and available_at > datetime.now(UTC)
    if early:
        yield f"it may not be published before {cell(available_at)}"
    if state is State.OPTIMISTIC:
        yield "its writer publishes it straight after the commit; a relay publishes it if the writer does not"
    elif state is State.FAILED:
        yield f"{_attempts(event)} failed, and the next one is {due}"
    elif state is State.DEFERRED and not early:
        yield f"its destination was down, and the next try is {due}"
    elif state is State.PARKED or (report.block and not is_head):
        yield "it waits behind the head of its stream"
    if not is_head:
        yield from _block_reasons(report)


def _event_helps(event: dict[str, Any], state: State, report: StreamReport) -> Iterator[Suggestion]:
    if state is State.SENT:
        return
    if state is State.DEAD_LETTER:
        yield from _dead_letter_suggestions(event)
        return
    yield from _block_helps(report)
    yield from _relay_helps(report)
    if report.relays and state is State.FAILED:
        yield Suggestion("outrider doctor", "checks the broker and the topic")


def _stream_reasons(report: StreamReport) -> Iterator[str]:
    yield from _block_reasons(report)
    yield _relay_reason(report)


def _block_reasons(report: StreamReport) -> Iterator[str]:
    block, head = report.block, report.head
    if block is None:
        return
    named = f"{head['event_type']} {head['event_id']}" if head else "an event"
    if block.cause == BlockReason.DEAD_LETTER:
        reason = f" ({head['reason']})" if head else ""
        yield f"the stream is blocked by the dead letter {named}{reason}, until a person decides; {block.waiting} wait"
    elif block.cause == BlockReason.DRAINING:
        yield f"the stream drains: its {block.waiting} held events go out in order"
    else:
        error = (head.get("failure") or {}).get("error") if head else None
        failed = f" after {_attempts(head)}: {error}" if head and error else ""
        yield f"the head of the stream, {named}, is {block.cause}{failed}; it is due {cell(block.due_at)}"


def _relay_reason(report: StreamReport) -> str:
    if not report.relays:
        return "no relay is running"
    if report.lane is None:
        return "no relay has read it yet; a relay assigns its lane when it fetches"
    if report.owner is None:
        return f"no relay owns lane {report.lane} at the moment; a running relay claims it with its next heartbeat"
    return f"relay {report.owner} owns lane {report.lane}, and publishes its events in order"


def _relay_helps(report: StreamReport) -> Iterator[Suggestion]:
    if not report.relays:
        yield RELAY


def _block_helps(report: StreamReport) -> Iterator[Suggestion]:
    if report.block and report.head and report.block.cause == BlockReason.DEAD_LETTER:
        yield from _dead_letter_suggestions(report.head)


def _dead_letter_suggestions(dead_letter: dict[str, Any]) -> Iterator[Suggestion]:
    event_id = dead_letter["event_id"]
    yield Suggestion(f"outrider dead-letters replay {event_id}", "sends it again")
    yield Suggestion(f"outrider dead-letters edit {event_id}", "changes its payload, headers or topic before a replay")
    yield Suggestion(f"outrider dead-letters discard {event_id}", "deletes it for good; its stream goes on")


def _consumer_reason(row: dict[str, Any]) -> str:
    at = f"at the consumer {row['consumer']}, {row['topic']} (band {BAND_NAMES[row['band']]})"
    if row["cause"] == "early":
        return f"{at} waits for the event after number {row['seen']} since {cell(row['since'])}"
    if row["cause"] == "draining":
        return f"{at} drains: its held events are handled in order"
    return f"{at} is blocked by a dead letter since {cell(row['since'])}"


def _consumer_helps(row: dict[str, Any]) -> Iterator[Suggestion]:
    named = f"--consumer {row['consumer']} --topic {row['topic']} --key {row['key']}"
    if row["cause"] == "early":
        band = "" if BAND_NAMES[row["band"]] == "normal" else f" --band {BAND_NAMES[row['band']]}"
        yield Suggestion(f"outrider inbox skip-gap {named}{band}", "continues without the missing event")
    elif row["cause"] != "draining":
        yield Suggestion(f"outrider inbox list {named}", "shows the dead letter; replay or discard it by its id")


def _block_facts(report: StreamReport) -> dict[str, Any] | None:
    if report.block is None:
        return None
    head = report.head["event_id"] if report.head else None
    return {"cause": report.block.cause, "due_at": report.block.due_at, "waiting": report.block.waiting, "head": head}


def _topic(event: dict[str, Any]) -> str:
    return default_topic(event["event_type"], event.get("topic"), event.get("routing_key"))


def _attempts(event: dict[str, Any]) -> str:
    return f"{event['attempts']} attempt{'' if event['attempts'] == 1 else 's'}"


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
