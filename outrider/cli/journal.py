"""`outrider db journal`: switches the journal of the outbox; and the comparison of `outrider doctor --journal`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from outrider import app
from outrider.checks import CheckResult, Level, fail, ok, warn
from outrider.cli.options import Json, StoreLocation, expand_options
from outrider.cli.output import emit, say, show_table
from outrider.config import Config
from outrider.outbox.journal import FINDINGS_MAX, PROBLEMS, JournalFinding, JournalReport, compare
from outrider.outbox.store import OutboxStore

COLUMNS = ("problem", "event_id", "in", "last_entry", "transaction_id", "log_position", "next")

CHECK = "journal"

T = TypeVar("T")


class Turn(StrEnum):
    """The positions of the switch."""

    ON = "on"
    OFF = "off"


@expand_options
def journal(
    turn: Annotated[Turn | None, typer.Argument(help="Switch it; without this, show the switch.")] = None,
    *,
    location: StoreLocation,
    json: Json = False,
) -> None:
    """Show the journal, or switch it for all writers and relays at once. `doctor --journal` reads it."""

    async def work(store: OutboxStore) -> tuple[bool, Any]:
        changed = turn is not None and await store.journal.turn(on=turn is Turn.ON)
        return changed, await store.journal.switch()

    changed, switch = asyncio.run(_with_store(location.read(), work))
    state = Turn.ON if switch.is_on else Turn.OFF
    if json:
        emit({"journal": state, "since": switch.since, "changed": changed})
        return
    since = f" since {switch.since:%Y-%m-%d %H:%M:%S %Z}" if switch.since else ""
    say(f"the journal is {state}{since}" if changed or turn is None else f"nothing to do: it is {state}{since}")


def check(chosen: Config, *, as_json: bool) -> tuple[JournalReport, CheckResult]:
    """Compare the journal with the tables, with progress on a terminal."""
    columns = TextColumn("{task.description} {task.completed} events")
    shown = Progress(
        columns, console=Console(file=sys.stderr), transient=True, disable=as_json or not sys.stderr.isatty()
    )

    async def work(store: OutboxStore) -> JournalReport:
        with shown:
            task = shown.add_task("comparing", total=None)
            return await compare(store.journal, lambda report: shown.update(task, completed=report.events))

    report = asyncio.run(_with_store(chosen, work))
    return report, result_of(report)


def result_of(report: JournalReport) -> CheckResult:
    """Return the check result of a report.

    >>> from outrider.outbox.journal import JournalSwitch
    >>> result_of(JournalReport(JournalSwitch(is_on=False))).remedy
    'run: outrider db journal on'
    """
    if not report.switch.is_on:
        return warn(CHECK, "the journal is off, so there is nothing to compare", "run: outrider db journal on")
    if not report.counts:
        return ok(CHECK, f"{report.events} events with entries; outbox, archive and dead letters agree with them")
    found = ", ".join(f"{count} {problem}" for problem, count in sorted(report.counts.items()))
    return fail(CHECK, f"{found} among {report.events} events with entries", "look at each event: outrider explain ID")


def show(report: JournalReport, result: CheckResult) -> None:
    """Print findings and the result for people."""
    if report.findings:
        show_table(COLUMNS, [_row(finding) for finding in report.findings], empty="")
        for problem in sorted(report.counts):
            say(f"{problem}: {PROBLEMS[problem]}")
    if report.counts.total() > FINDINGS_MAX:
        say(f"the first {FINDINGS_MAX} findings are listed, of {report.counts.total()}")
    say(result.text if result.level is Level.OK else f"{result.text}\n→ {result.remedy}")


def facts(report: JournalReport, result: CheckResult) -> dict[str, Any]:
    """Return the report for programs."""
    counts = {str(problem): count for problem, count in report.counts.items()}
    findings = [_row(finding) for finding in report.findings]
    return {"level": result.level, "results": [asdict(result)], "counts": counts, "findings": findings}


def _row(finding: JournalFinding) -> dict[str, Any]:
    entry = finding.entry
    return {
        "problem": finding.problem,
        "event_id": str(finding.event_id),
        "in": ", ".join(finding.places) or None,
        "last_entry": entry and entry.kind,
        "transaction_id": entry and entry.transaction_id,
        "log_position": entry and entry.log_position,
        "at": entry and entry.at,
        "next": finding.command,
    }


async def _with_store(chosen: Config, work: Callable[[OutboxStore], Awaitable[T]]) -> T:
    store = await app.open_store(chosen.store_url(), schema=chosen.schema)
    try:
        return await work(store)
    finally:
        await store.close()
