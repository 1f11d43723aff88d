"""`outrider audit`: lists the audit log of all sagas, verifies its chains, and removes old lines."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from outrider.audit_chain import KEY_VARIABLE, AuditLine, read_keys
from outrider.cli.options import Json, Limit, StoreLocation, Yes, confirm, expand_options
from outrider.cli.output import NotDone, emit, say, show_table
from outrider.cli.saga_operator import saga_id, with_store
from outrider.errors import UsageError
from outrider.saga.audit import AuditCheck, AuditReport, verify
from outrider.saga.model import AuditCriteria
from outrider.saga.store import SagaStore

app = typer.Typer(help="The audit log: list, verify, and remove old lines.", no_args_is_help=True)

COLUMNS = ("at", "saga_id", "line", "new_status", "step", "what", "actor", "detail")

FINDING_COLUMNS = ("problem", "saga_id", "line", "anchor", "at")

SHOWN_MAX = 1_000
"""The most findings that are listed; the others are counted."""


@app.command("list")
@app.command("ls", hidden=True)
@expand_options
def list_lines(
    *,
    location: StoreLocation,
    saga: Annotated[str | None, typer.Option("--saga", metavar="ID", help="Only lines of this saga.")] = None,
    actor: Annotated[str | None, typer.Option("--actor", help="Only lines of this person or worker.")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help="Only lines since this time.")] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List lines of the audit log, the latest first. Alias: `ls`."""
    wanted = None if saga is None else saga_id(saga, None)
    criteria = AuditCriteria(wanted, actor, None if since is None else _time(since), limit)
    rows = [_facts(line) for line in with_store(location, lambda store: store.audit.find(criteria))]
    emit(rows) if json else show_table(COLUMNS, rows, empty="no lines match")


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
    """Find changed, removed, forged and moved lines. Exit code 1 on a finding."""
    since = None if keyed_since is None else _time(keyed_since)
    check = AuditCheck(read_keys(), since, None if expect is None else _anchor(expect))

    async def work(store: SagaStore) -> AuditReport:
        with _progress(json=json) as shown:
            task = shown.add_task("reading", total=None)
            return await verify(store.audit, check, lambda report: shown.update(task, completed=report.lines))

    report: AuditReport = with_store(location, work)
    findings = [finding._asdict() for finding in report.findings[:SHOWN_MAX]]
    anchor = report.anchor and f"{report.anchor.number}:{report.anchor.hash.hex()}"
    if json:
        counts = {name: getattr(report, name) for name in ("lines", "chains", "anchors", "without_details")}
        emit({**counts, "keyed": bool(check.keys), "last_anchor": anchor, "findings": findings})
    else:
        if findings:
            show_table(FINDING_COLUMNS, findings, empty="")
        say(f"{report.lines} lines in {report.chains} chains and {report.anchors} anchors were verified")
        if anchor:
            say(f"the last anchor is {anchor}; keep it elsewhere, for --expect")
        if not check.keys:
            say(f"no key is set: a forger who can write to the tables can compute hashes; see {KEY_VARIABLE}")
    if report.findings:
        raise NotDone(f"{len(report.findings)} findings: the audit log was changed by something other than outrider")


@app.command("prune")
@expand_options
def prune(
    *,
    location: StoreLocation,
    days: Annotated[float, typer.Option("--days", min=0, help="The age of the youngest line that is removed.")] = 365.0,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove the lines of removed sagas once all are old, and leave anchors. Saga workers do the same by themselves."""
    confirm(f"remove audit lines that are older than {days:g} days", yes=yes, as_json=json)
    removed = with_store(location, lambda store: store.audit.remove_lines(days))
    emit({"removed": removed}) if json else say(f"{removed} lines were removed")


def _facts(line: AuditLine) -> dict[str, Any]:
    facts = line._asdict()
    hashes = {name: facts[name] and facts[name].hex() for name in ("state_hash", "hash")}
    names = ("place", "salt", "digest")
    return {name: fact for name, fact in facts.items() if name not in names} | hashes


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
