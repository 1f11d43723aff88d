"""`outrider saga`: lists, shows and explains sagas, draws their graphs, runs workers and sends operator commands."""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import typer

from outrider import app as root
from outrider.cli import saga_operator, saga_run
from outrider.cli.imports import find_payloads, find_sagas
from outrider.cli.keys import opened_saga
from outrider.cli.options import ConfigFile, Json, Limit, SchemaName, StoreLocation, StoreUrl
from outrider.cli.output import emit, say, show_facts, show_table
from outrider.cli.saga_operator import Id, OfType, Target, recorded, with_store
from outrider.config import nearest
from outrider.errors import OutriderError, UsageError
from outrider.outbox.model import Criteria
from outrider.saga.definition.saga import Saga, SagaRegistry
from outrider.saga.definition.steps import Definition
from outrider.saga.diagram import mermaid, mermaid_run, span
from outrider.saga.execution.step_executor import PHASE_HEADER
from outrider.saga.explain import Suggestion, explain
from outrider.saga.model import Instance, JournalEntry, Phase, SagaCriteria, SagaMessage, SagaRecord, Status, StepStatus
from outrider.saga.state.encryption import without_encrypted_data
from outrider.saga.store import SagaStore

app = typer.Typer(help="Sagas: list, show, explain, run, and operator commands.", no_args_is_help=True)

COLUMNS = (
    *("saga_id", "saga_type", "definition_version", "correlation_id", "status", "current_step", "attention"),
    *("parent_id", "updated_at", "last_error"),
)

CHILD_COLUMNS = ("parent_step", "saga_id", "saga_type", "definition_version", "status", "attention", "last_error")

CHILDREN_MAX = 1000

JOURNAL = ("step", "phase", "status", "attempts", "started_at", "ended_at", "due_at", "error")

MESSAGES = ("message_id", "kind", "name", "key", "delivered_at", "body")

AUDIT = ("at", "new_status", "step", "what", "actor", "detail")

AUDIT_MAX = 100_000

NAMED = ("saga_id", "saga_type", "definition_version", "correlation_id", "status", "needs_attention", "owner")

Type = Annotated[str | None, typer.Option("--type", help="Only sagas of this type.")]

WithState = Annotated[bool, typer.Option("--state", help="Show the state, and the bodies of messages, too.")]

HIDDEN = ("state", "audit_lines", "audit_hash")

EVENTS_MAX = 20

FACTS = ("event_id", "state", "event_type", "topic", "attempts", "created_at", "dead_lettered_at", "reason", "failure")

EVENT_COLUMNS = ("event_id", "state", "event_type", "topic", "attempts", "created_at")

ELSEWHERE = "--store URL of the participant's store"


@app.command("ls", hidden=True)
@app.command("list")
def list_sagas(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: Type = None,
    status: Annotated[str | None, typer.Option("--status", help="Only sagas with this status.")] = None,
    correlation_id: Annotated[
        str | None, typer.Option("--correlation-id", help="Only those with this correlation id.")
    ] = None,
    attention: Annotated[bool, typer.Option("--attention", help="Only sagas that need an operator.")] = False,
    stuck: Annotated[
        float | None,
        typer.Option("--stuck", min=0, metavar="SECONDS", help="Only sagas that are overdue for this time."),
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="ID", help="Only the children of this saga.")
    ] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List sagas, those that need attention first, then the latest change first."""
    parent_id = None if parent is None else saga_operator.saga_id(parent, None)
    criteria = SagaCriteria((), saga_type, correlation_id, _status(status), attention or None, stuck, limit, parent_id)
    found = with_store(StoreLocation(config, store, schema), lambda opened: opened.admin.find(criteria))
    rows = [_without_state(instance) for instance in found]
    emit(rows) if json else show_table(COLUMNS, _with_attention(rows), empty="no sagas match")


async def find_events(location: StoreLocation, saga_id: UUID) -> OutboxEvents:
    """Read the events staged under the key of a saga. A read error is returned in `problem`; the command goes on."""
    chosen = location.read()
    criteria = Criteria(key=str(saga_id), limit=EVENTS_MAX)
    try:
        store = await root.open_store(chosen.store_url(), schema=chosen.schema)
        try:
            admin = store.admin
            return OutboxEvents(await admin.events(criteria), await admin.dead_letters(criteria), await admin.relays())
        finally:
            await store.close()
    except OutriderError as error:
        return OutboxEvents(problem=str(error))


@app.command("show")
def show(
    id: Id,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    state: WithState = False,
    audit: Annotated[int, typer.Option("--audit", min=0, help="Number of entries of its audit log, the latest.")] = 20,
    json: Json = False,
) -> None:
    """Show one saga: status, journal, unread messages, undelivered events, and the end of the audit log."""
    location = StoreLocation(config, store, schema)
    view = with_store(location, lambda opened: _look(opened, id, saga_type, audit))
    outbox_events = asyncio.run(find_events(location, view.record.instance.saga_id))
    facts = _without_state(view.record.instance)
    record = opened_saga(find_payloads(location.read().payloads), view.record) if state else view.record
    if state:
        facts["state"] = jsonlib.loads(record.instance.state)
    journal = [asdict(entry) for entry in record.journal]
    messages = [_message(message, body=state) for message in view.record.messages]
    children = [_without_state(child) for child in view.children]
    if json:
        more = {"outbox": outbox_events.facts, "audit": view.audit, "children": children}
        emit({**facts, "journal": journal, "messages": messages, **more})
        return
    show_facts(facts)
    say("")
    show_table(JOURNAL, journal, empty="no step has begun")
    if children:
        say("\nchildren")
        show_table(CHILD_COLUMNS, _with_attention(children), empty="")
    if messages:
        say("\nmail that waits")
        show_table(MESSAGES if state else MESSAGES[:-1], messages, empty="")
    if outbox_events.undelivered or outbox_events.dead:
        say("\nin the outbox, or dead-lettered")
        show_table(EVENT_COLUMNS, outbox_events.facts["events"], empty="")
    if view.audit:
        say("\ntrail")
        show_table(AUDIT, view.audit, empty="")


def outbox_helps(
    outbox_events: OutboxEvents, record: SagaRecord, definition: Definition | None
) -> Iterator[Suggestion]:
    """Suggest commands: run a relay, replay a dead letter, or inspect the participant."""
    if outbox_events.undelivered and not outbox_events.relays:
        yield Suggestion(
            "outrider relay", "publishes what is in the outbox; it needs the same --store, and the --broker"
        )
    for row in outbox_events.dead:
        yield Suggestion(f"outrider dead-letters replay {row['event_id']}", f"sends the {_kind(row)} again")
    asked = (
        []
        if outbox_events.undelivered or outbox_events.dead or outbox_events.problem
        else list(_is_asked(record, definition))
    )
    for entry in asked[:1]:
        yield Suggestion(
            f"outrider inbox list {ELSEWHERE}",
            f"shows whether the command of {entry.step}, which has left, is a dead letter of its participant",
        )
        yield Suggestion(f"outrider inbox streams {ELSEWHERE}", "shows whether it waits there")


def outbox_reasons(outbox_events: OutboxEvents, now: datetime) -> Iterator[str]:
    """Explain the events that are not published yet, and the events that need an operator."""
    if outbox_events.problem:
        yield f"the outbox could not be looked at: {outbox_events.problem}"
    for row in outbox_events.undelivered:
        nobody = "" if outbox_events.relays else ", and no relay is running"
        yield f"the {_kind(row)} is still in the outbox, {row['state']}, since {_since(row['created_at'], now)}{nobody}"
    for row in outbox_events.dead:
        yield f"the {_kind(row)} is in the dead letters, since {_since(row['dead_lettered_at'], now)}: {row['reason']}"


@app.command("why", hidden=True)
@app.command("explain")
def explain_saga(
    id: Id,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    sagas: Annotated[
        str | None,
        typer.Option("--sagas", metavar="MODULE:NAME", help="The definitions, for a precise explanation."),
    ] = None,
    json: Json = False,
) -> None:
    """Say in plain words what a saga waits for, who has it, what comes next, and which command helps."""
    known = find_sagas(sagas) if sagas else None
    location = StoreLocation(config, store, schema)
    view = with_store(location, lambda opened: _look(opened, id, saga_type, 0))
    record, instance = _explainable(location, view.record), view.record.instance
    outbox_events = asyncio.run(find_events(location, instance.saga_id))
    definition = _definition(known, instance)
    lines = explain(record, definition, view.children)
    reasons = [*lines.reasons, *outbox_reasons(outbox_events, record.now), *_not_among(sagas, known, instance)]
    helps = [*outbox_helps(outbox_events, record, definition), *lines.helps]
    if json:
        facts = _without_state(instance)
        named = {name: facts[name] for name in NAMED}
        emit({**named, "reasons": reasons, "helps": [h._asdict() for h in helps], "outbox": outbox_events.facts})
        return
    say(f"{instance.saga_type} {instance.correlation_id} is {instance.status}")
    for reason in reasons:
        say(f"- {reason}")
    if helps:
        say("what helps")
    for command, effect in helps:
        say(f"  {command}  {effect}")


def _explainable(location: StoreLocation, record: SagaRecord) -> SagaRecord:
    """Return a saga with the items of its steps; an explanation does without those that do not open."""
    return without_encrypted_data(opened_saga(find_payloads(location.read().payloads), record, quiet=True))


class ShownSaga(NamedTuple):
    """The displayed data of a saga."""

    record: SagaRecord
    audit: list[dict[str, Any]]
    children: list[Instance]


async def _look(store: SagaStore, text: str, saga_type: str | None, lines: int) -> ShownSaga:
    record = await recorded(store.admin, text, saga_type)
    # The audit log is read from its oldest line, so the latest lines need a full read.
    audit = await store.admin.audit(record.instance.saga_id, AUDIT_MAX) if lines else []
    children = await store.admin.find(SagaCriteria(limit=CHILDREN_MAX, parent_id=record.instance.saga_id))
    children.sort(key=lambda child: (child.started_at, child.parent_step or ""))
    return ShownSaga(record, audit[-lines:] if lines else [], children)


def _definition(known: SagaRegistry | None, instance: Instance) -> Definition | None:
    saga = known.find(instance.saga_type, instance.definition_version) if known else None
    return saga.definition if saga else None


def _not_among(target: str | None, known: SagaRegistry | None, instance: Instance) -> list[str]:
    """Explain that a worker with these definitions does not run the saga."""
    if known is None or known.find(instance.saga_type, instance.definition_version):
        return []
    has = ", ".join(f"{saga_type} version {version}" for saga_type, version in sorted(known.versions))
    wanted = f"version {instance.definition_version} of {instance.saga_type}"
    return [f"{target} does not hold {wanted}, so a worker that runs it leaves this saga alone (it has: {has})"]


def _status(text: str | None) -> str | None:
    known = [str(status) for status in Status]
    if text is None or text in known:
        return text
    hint = f"did you mean {near}? " if (near := nearest(text, known)) else ""
    raise UsageError(f"{text!r} is not a status of a saga; {hint}(valid: {', '.join(known)})")


def _without_state(instance: Instance) -> dict[str, Any]:
    return {name: value for name, value in asdict(instance).items() if name not in HIDDEN}


def _with_attention(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "attention": "yes" if row["needs_attention"] else None} for row in rows]


def _message(message: SagaMessage, *, body: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {**message._asdict(), "body": jsonlib.loads(message.body)}
    return facts if body else {name: value for name, value in facts.items() if name != "body"}


app.command("retry")(saga_operator.retry)


app.command("compensate")(saga_operator.compensate)


app.command("mark-done")(saga_operator.mark_done)


def graph(
    target: Target,
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Draw this run; with --type, by correlation id.")
    ] = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: Annotated[str | None, typer.Option("--type", help="Which saga, if there are several.")] = None,
    version: Annotated[int | None, typer.Option("--version", help="Which version of it; else the latest.")] = None,
    json: Json = False,
) -> None:
    """Draw a saga for Mermaid: its definition, or with an id how far that one has come."""
    sagas = find_sagas(target)
    if id is None:
        saga = _chosen(sagas, target, saga_type, version)
        facts: dict[str, Any] = {"saga_type": saga.saga_type, "version": saga.version}
        picture = mermaid(saga.definition)
    else:
        instance, picture = with_store(
            StoreLocation(config, store, schema), lambda opened: _run(opened, sagas, target, id, saga_type)
        )
        facts = {"saga_id": instance.saga_id, "saga_type": instance.saga_type, "version": instance.definition_version}
    emit({**facts, "mermaid": picture}) if json else say(picture.rstrip())


app.command("graph")(graph)


app.command("run")(saga_run.run)


async def _run(
    store: SagaStore, sagas: SagaRegistry, target: str, text: str, saga_type: str | None
) -> tuple[Instance, str]:
    record = without_encrypted_data(opened_saga(sagas.payloads, await recorded(store.admin, text, saga_type)))
    instance = record.instance
    saga = sagas.find(instance.saga_type, instance.definition_version)
    if saga is None:
        wanted = f"version {instance.definition_version} of {instance.saga_type}"
        raise UsageError(f"{target} does not hold {wanted}, which saga {text} is of (it has: {_listed(sagas)})")
    return instance, mermaid_run(saga.definition, record, await store.admin.audit(instance.saga_id))


def _chosen(sagas: SagaRegistry, target: str, saga_type: str | None, version: int | None) -> Saga[Any]:
    types = {saga.saga_type for saga in sagas}
    if saga_type is None and len(types) > 1:
        raise UsageError(f"{target} holds several sagas; choose one with --type: {', '.join(sorted(types))}")
    wanted = saga_type or next(iter(types))
    found = [saga for saga in sagas if saga.saga_type == wanted and version in (None, saga.version)]
    if not found:
        hint = f"did you mean {near}? " if (near := nearest(wanted, types - {wanted})) else ""
        text = wanted if version is None else f"{wanted} version {version}"
        raise UsageError(f"{target} holds no {text}; {hint}(it has: {_listed(sagas)})")
    return max(found, key=lambda saga: saga.version)


def _listed(sagas: SagaRegistry) -> str:
    return ", ".join(f"{saga_type} version {version}" for saga_type, version in sorted(sagas.versions))


class OutboxEvents(NamedTuple):
    """The events in the outbox and the dead letters under the key of a saga, and the number of live relays."""

    undelivered: Sequence[dict[str, Any]] = ()
    dead: Sequence[dict[str, Any]] = ()
    relays: int = 0
    problem: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return the data for programs, without payloads."""
        rows = [{name: row[name] for name in FACTS if name in row} for row in (*self.undelivered, *self.dead)]
        return {"events": rows, "relays": self.relays, "problem": self.problem}


def _is_asked(record: SagaRecord, definition: Definition | None) -> Iterator[JournalEntry]:
    """Yield the steps whose command is sent and not answered; the definition excludes steps that only wait."""
    for entry in record.journal:
        step = definition.find(entry.step) if definition else None
        action = (step.action if entry.phase is Phase.ACTION else step.compensation) if step else None
        is_open = entry.status in (StepStatus.STARTED, StepStatus.RETRYING, StepStatus.FAILED)
        if is_open and action and action.command and action.command.event_type:
            yield entry


def _kind(row: dict[str, Any]) -> str:
    return f"{'command' if PHASE_HEADER in (row['headers'] or {}) else 'event'} {row['event_type']}"


def _since(moment: datetime, now: datetime) -> str:
    seconds = max(0.0, (now - moment).total_seconds())
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S} ({span(seconds)} ago)"
