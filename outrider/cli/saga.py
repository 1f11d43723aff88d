"""`outrider saga`: which sagas there are, how one stands and why, and what a person can order."""

from __future__ import annotations

import asyncio
import json as jsonlib
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import typer

from outrider.cli import saga_graph, saga_orders, saga_outbox, saga_run
from outrider.cli.options import ConfigFile, Json, Limit, Place, SchemaName, StoreUrl
from outrider.cli.output import emit, say, show_facts, show_table
from outrider.cli.saga_choice import Id, OfType, recorded, with_store
from outrider.cli.target import find_sagas
from outrider.config import nearest
from outrider.errors import Misuse
from outrider.saga.sagas import Sagas
from outrider.saga.steps import Definition
from outrider.saga.why import explain
from outrider.saga_store import Instance, Mail, Record, SagaCriteria, SagaStore, Status

app = typer.Typer(help="Sagas: how they stand and why, and what to do about it.", no_args_is_help=True)
COLUMNS = (
    *("saga_id", "saga_type", "definition_version", "correlation_id", "status", "current_step", "attention"),
    *("updated_at", "last_error"),
)
JOURNAL = ("step", "phase", "progress", "attempts", "intended_at", "ended_at", "due_at", "error")
MAIL = ("mail_id", "kind", "name", "key", "posted_at", "body")
AUDIT = ("at", "new_status", "step", "what", "actor", "detail")
AUDIT_MAX = 100_000
NAMED = ("saga_id", "saga_type", "definition_version", "correlation_id", "status", "needs_attention", "owner")
Type = Annotated[str | None, typer.Option("--type", help="Only sagas of this type.")]
WithState = Annotated[bool, typer.Option("--state", help="Show the state, and the bodies of mail, too.")]


@app.command("ls")
def ls(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: Type = None,
    status: Annotated[str | None, typer.Option("--status", help="Only those that stand so.")] = None,
    correlation_id: Annotated[
        str | None, typer.Option("--correlation-id", help="Only those with this correlation id.")
    ] = None,
    attention: Annotated[bool, typer.Option("--attention", help="Only those that need a person.")] = False,
    stuck: Annotated[
        float | None,
        typer.Option("--stuck", min=0, metavar="SECONDS", help="Only those that are overdue for so long."),
    ] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List sagas, those that need attention first, then the latest change first."""
    criteria = SagaCriteria((), saga_type, correlation_id, _status(status), attention or None, stuck, limit)
    found = with_store(Place(config, store, schema), lambda opened: opened.desk.find(criteria))
    rows = [_without_state(instance) for instance in found]
    if json:
        emit(rows)
    else:
        shown = [{**row, "attention": "yes" if row["needs_attention"] else None} for row in rows]
        show_table(COLUMNS, shown, empty="no sagas match")


@app.command("show")
def show(
    id: Id,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    state: WithState = False,
    audit: Annotated[int, typer.Option("--audit", min=0, help="How many lines of its trail, the latest.")] = 20,
    json: Json = False,
) -> None:
    """Show one saga: how it stands, its journal, the mail that waits, what has not left, and the end of its trail."""
    place = Place(config, store, schema)
    view = with_store(place, lambda opened: _look(opened, id, saga_type, audit))
    post = asyncio.run(saga_outbox.look(place, view.record.instance.saga_id))
    facts = _without_state(view.record.instance)
    if state:
        facts["state"] = jsonlib.loads(view.record.instance.state)
    journal = [asdict(entry) for entry in view.record.journal]
    mail = [_mail(letter, body=state) for letter in view.record.mail]
    if json:
        emit({**facts, "journal": journal, "mail": mail, "outbox": post.facts, "audit": view.audit})
        return
    show_facts(facts)
    say("")
    show_table(JOURNAL, journal, empty="no step has begun")
    if mail:
        say("\nmail that waits")
        show_table(MAIL if state else MAIL[:-1], mail, empty="")
    if post.undelivered or post.dead:
        say("\nin the outbox, or buried")
        show_table(saga_outbox.COLUMNS, post.facts["events"], empty="")
    if view.audit:
        say("\ntrail")
        show_table(AUDIT, view.audit, empty="")


@app.command("why")
def why(
    id: Id,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    sagas: Annotated[
        str | None,
        typer.Option("--sagas", metavar="MODULE:NAME", help="The definitions, to say precisely what it waits for."),
    ] = None,
    json: Json = False,
) -> None:
    """Say in plain words what a saga waits for, who has it, what comes next, and which command helps."""
    known = find_sagas(sagas) if sagas else None
    place = Place(config, store, schema)
    record: Record = with_store(place, lambda opened: recorded(opened.desk, id, saga_type))
    instance = record.instance
    post = asyncio.run(saga_outbox.look(place, instance.saga_id))
    definition = _definition(known, instance)
    told = explain(record, definition)
    reasons = [*told.reasons, *saga_outbox.reasons(post, record.now), *_not_among(sagas, known, instance)]
    helps = [*saga_outbox.helps(post, record, definition), *told.helps]
    if json:
        facts = _without_state(instance)
        named = {name: facts[name] for name in NAMED}
        emit({**named, "reasons": reasons, "helps": [h._asdict() for h in helps], "outbox": post.facts})
        return
    say(f"{instance.saga_type} {instance.correlation_id} is {instance.status}")
    for reason in reasons:
        say(f"- {reason}")
    if helps:
        say("what helps")
    for command, effect in helps:
        say(f"  {command}  {effect}")


class View(NamedTuple):
    """What is shown of a saga."""

    record: Record
    audit: list[dict[str, Any]]


async def _look(store: SagaStore, text: str, saga_type: str | None, lines: int) -> View:
    record = await recorded(store.desk, text, saga_type)
    # The trail begins with its oldest line, so all of it is read for the latest ones.
    audit = await store.desk.audit(record.instance.saga_id, AUDIT_MAX) if lines else []
    return View(record, audit[-lines:] if lines else [])


def _definition(known: Sagas | None, instance: Instance) -> Definition | None:
    saga = known.find(instance.saga_type, instance.definition_version) if known else None
    return saga.definition if saga else None


def _not_among(target: str | None, known: Sagas | None, instance: Instance) -> list[str]:
    """Say that a worker with these definitions leaves the saga alone."""
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
    raise Misuse(f"{text!r} is not a status of a saga; {hint}(valid: {', '.join(known)})")


def _without_state(instance: Instance) -> dict[str, Any]:
    return {name: value for name, value in asdict(instance).items() if name != "state"}


def _mail(mail: Mail, *, body: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {**mail._asdict(), "body": jsonlib.loads(mail.body)}
    return facts if body else {name: value for name, value in facts.items() if name != "body"}


app.command("retry")(saga_orders.retry)
app.command("compensate")(saga_orders.compensate)
app.command("resume")(saga_orders.resume)
app.command("graph")(saga_graph.graph)
app.command("run")(saga_run.run)
