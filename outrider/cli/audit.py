"""`outrider audit`: lists the audit log of sagas and the operation log, verifies their chains, removes old lines."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from outrider.audit_chain import KEY_VARIABLE, AuditCheck, AuditLine, read_keys
from outrider.cli.imports import find_payloads
from outrider.cli.keys import opened_state
from outrider.cli.options import (
    As,
    Json,
    Limit,
    StoreLocation,
    Yes,
    actor,
    confirm,
    event_id,
    expand_options,
    with_outbox,
)
from outrider.cli.output import NotDone, emit, say, show_table
from outrider.cli.saga_operator import saga_id, with_store
from outrider.errors import UsageError
from outrider.operation_log import OperationCriteria, OperationLine, OperationReport, verify_operations
from outrider.outbox.store import OutboxStore
from outrider.saga.audit import AuditReport, verify
from outrider.saga.model import AuditCriteria, SagaRecord
from outrider.saga.store import SagaStore

app = typer.Typer(help="The audit log and the operation log: list, verify, and remove old lines.", no_args_is_help=True)

COLUMNS = ("at", "saga_id", "line", "new_status", "step", "what", "actor", "detail")

OPERATION_COLUMNS = ("at", "line", "actor", "verb", "event_id", "consumer", "detail")

STATES = ("old_state", "new_state")

FINDING_COLUMNS = ("log", "problem", "saga_id", "line", "anchor", "at")

SHOWN_MAX = 1_000
"""The most findings that are listed; the others are counted."""


@app.command("list")
@app.command("ls", hidden=True)
@expand_options
def list_lines(
    *,
    location: StoreLocation,
    operations: Annotated[
        bool, typer.Option("--operations", help="List the operation log, which has the commands of operators.")
    ] = False,
    saga: Annotated[str | None, typer.Option("--saga", metavar="ID", help="Only lines of this saga.")] = None,
    event: Annotated[
        str | None, typer.Option("--event", metavar="ID", help="Only commands to this event; with --operations.")
    ] = None,
    by: Annotated[str | None, typer.Option("--actor", help="Only lines of this person or worker.")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help="Only lines since this time.")] = None,
    limit: Limit = 50,
    states: Annotated[
        bool, typer.Option("--states", help="Show the states before and after; needs --saga. Decrypted with the keys.")
    ] = False,
    json: Json = False,
) -> None:
    """List lines of the audit log, the latest first. Alias: `ls`."""
    if (saga if operations else event) is not None:
        raise UsageError("--saga chooses lines of sagas, and --event commands of --operations; give one of them")
    if states and saga is None:
        raise UsageError("states are shown for one saga; add --saga ID")
    start, columns = None if since is None else _time(since), [*COLUMNS]
    if operations:
        chosen = OperationCriteria(None if event is None else event_id(event), by, start, limit)
        commands = with_outbox(location, lambda store: store.operations.find(chosen))
        rows, columns = [_operation_facts(line) for line in commands], [*OPERATION_COLUMNS]
    else:
        criteria = AuditCriteria(None if saga is None else saga_id(saga, None), by, start, limit)
        lines: Sequence[AuditLine] = with_store(location, lambda store: store.audit.find(criteria))
        rows = [_facts(line) for line in lines]
        if states and criteria.saga_id is not None:
            shown = _states(location, criteria.saga_id)
            rows = [{**row, **shown[line.place]} for row, line in zip(rows, lines, strict=True)]
            columns += STATES
    emit(rows) if json else show_table(columns, rows, empty="no lines match")


@app.command("verify")
@expand_options
def verify_chains(
    *,
    location: StoreLocation,
    keyed_since: Annotated[
        str | None,
        typer.Option("--keyed-since", metavar="TIME", help="Accept lines without a key before this time."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="NUMBER:HASH", help="An anchor that was noted elsewhere must still be there."),
    ] = None,
    json: Json = False,
) -> None:
    """Find changed, removed, forged and moved lines in both logs. Exit code 1 on a finding."""
    since = None if keyed_since is None else _time(keyed_since)
    check = AuditCheck(read_keys(), since, None if expect is None else _anchor(expect))

    async def read_sagas(store: SagaStore) -> AuditReport:
        with _progress(json=json) as shown:
            task = shown.add_task("sagas:", total=None)
            return await verify(store.audit, check, lambda report: shown.update(task, completed=report.lines))

    async def read_operations(store: OutboxStore) -> OperationReport:
        with _progress(json=json) as shown:
            task = shown.add_task("operations:", total=None)
            return await verify_operations(
                store.operations, check, lambda report: shown.update(task, completed=report.lines)
            )

    # The anchors come first: the operation log begins at the last one.
    sagas, operations = with_store(location, read_sagas), with_outbox(location, read_operations)
    found = sagas.findings + operations.findings
    _show_result(sagas, operations, keyed=bool(check.keys), json=json)
    if found:
        raise NotDone(f"{len(found)} findings: the audit log was changed by something other than outrider")


def _show_result(sagas: AuditReport, operations: OperationReport, *, keyed: bool, json: bool) -> None:
    findings = [finding._asdict() for finding in (sagas.findings + operations.findings)[:SHOWN_MAX]]
    anchor = sagas.anchor and f"{sagas.anchor.number}:{sagas.anchor.hash.hex()}"
    if json:
        counts = {name: getattr(sagas, name) for name in ("lines", "chains", "anchors", "without_details")}
        names = ("lines", "unchained", "without_details")
        commands = {name: getattr(operations, name) for name in names}
        emit({**counts, "operations": commands, "keyed": keyed, "last_anchor": anchor, "findings": findings})
        return
    if findings:
        show_table(FINDING_COLUMNS, findings, empty="")
    say(f"{sagas.lines} lines in {sagas.chains} chains and {sagas.anchors} anchors were verified")
    say(f"{operations.lines} lines of the operation log were verified")
    if operations.unchained:
        say(f"{operations.unchained} lines of the operation log are from before its chain, and cannot be verified")
    if anchor:
        say(f"the last anchor is {anchor}; keep it elsewhere, for --expect")
    if not keyed:
        say(f"no key is set: a forger who can write to the tables can compute hashes; see {KEY_VARIABLE}")


@app.command("prune")
@expand_options
def prune(
    *,
    location: StoreLocation,
    days: Annotated[float, typer.Option("--days", min=0, help="The age of the youngest line that is removed.")] = 365.0,
    yes: Yes = False,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Remove the lines of removed sagas once all are old, and old operator commands by whole days, and leave anchors.

    Saga workers and relays do the same by themselves.
    """
    confirm(f"remove audit lines that are older than {days:g} days", yes=yes, as_json=json)
    operator = actor(as_name, as_json=json)

    async def remove_operations(store: OutboxStore) -> int:
        await store.operations.record(operator, "audit_prune", days=days)
        return await store.operations.remove_lines(days)

    # The command is a line of the log before it removes anything.
    operations = with_outbox(location, remove_operations)
    sagas = with_store(location, lambda store: store.audit.remove_lines(days))
    removed = operations + sagas
    emit({"removed": removed}) if json else say(f"{removed} lines were removed")


def _states(location: StoreLocation, saga_id: UUID) -> dict[int, dict[str, str | None]]:
    """Return the states before and after each line of a saga, by its place. A line without a state changed none."""

    async def work(store: SagaStore) -> tuple[SagaRecord | None, Sequence[AuditLine]]:
        return await store.admin.show(saga_id), (await store.audit.chain(saga_id))[1]

    record, lines = with_store(location, work)
    payloads = find_payloads(location.read().payloads)
    states, before = dict[int, dict[str, str | None]](), None
    for line in lines:
        # A chain begins with the start of the saga, which is not the end of an earlier one.
        before = None if line.line == 1 else before
        after = before if line.state is None else opened_state(payloads, record, line.state)
        states[line.place] = {"old_state": before, "new_state": after}
        before = after
    return states


def _facts(line: AuditLine) -> dict[str, Any]:
    facts = line._asdict()
    hashes = {name: facts[name] and facts[name].hex() for name in ("state_hash", "hash")}
    names = ("place", "salt", "digest", "state")
    return {name: fact for name, fact in facts.items() if name not in names} | hashes


def _operation_facts(line: OperationLine) -> dict[str, Any]:
    facts = {name: fact for name, fact in line._asdict().items() if name not in {"place", "salt", "digest"}}
    return {**facts, "detail": jsonlib.loads(line.detail or "{}"), "hash": line.hash and line.hash.hex()}


def _time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a time; write 2026-01-31 or 2026-01-31T12:00:00+00:00") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _anchor(text: str) -> tuple[int, str]:
    number, _, hash = text.partition(":")
    if not number.isdecimal() or not hash:
        raise UsageError(f"{text!r} is not an anchor; copy NUMBER:HASH from an earlier `outrider audit verify`")
    return int(number), hash


def _progress(*, json: bool) -> Progress:
    columns = TextColumn("{task.description} {task.completed} lines")
    console = Console(file=sys.stderr)
    return Progress(columns, console=console, transient=True, disable=json or not sys.stderr.isatty())
