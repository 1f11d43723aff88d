"""`outrider doctor`: is everything set up so that Outrider can keep its promises?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from outrider.app import saga_inbox
from outrider.cli.errors import FINDING, UNREACHABLE
from outrider.cli.examination import examine, worst
from outrider.cli.options import BrokerUrl, ConfigFile, Json, SchemaName, StoreUrl
from outrider.cli.output import console, emit, say
from outrider.cli.target import find_inbox, find_sagas, imported, is_sagas
from outrider.config import load
from outrider.finding import Finding, Level
from outrider.inbox.inbox import Inbox
from outrider.inbox.router import Routes

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.REFUSE: "bold red"}


def doctor(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    broker: BrokerUrl = None,
    schema: SchemaName = None,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Examine this topic too, besides those that are staged.")
    ] = None,
    consume: Annotated[
        list[str] | None,
        typer.Option("--consume", metavar="MODULE:NAME", help="Examine the consumers of this inbox too."),
    ] = None,
    sagas: Annotated[
        list[str] | None,
        typer.Option("--sagas", metavar="MODULE:NAME", help="Examine the topics and consumers of these sagas too."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on a warning as well.")] = False,
    json: Json = False,
) -> None:
    """Examine store and broker, change nothing, and say what to do. Exits with 1 on a refusal, 3 if one is away."""
    chosen = load({"config": config, "store": store, "broker": broker, "schema": schema})
    holding = [target for target in consume or () if _holds_sagas(target)]
    known = [find_sagas(target) for target in [*(sagas or ()), *holding]]
    consumers = _routes(find_inbox(target) for target in consume or () if target not in holding)
    named = [*(topic or ()), *(name for each in known for name in each.topics)]
    findings = asyncio.run(examine(chosen, named, consumers, _routes(map(saga_inbox, known))))
    if json:
        emit({"verdict": worst(findings), "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    raise typer.Exit(exit_code(findings, strict=strict))


def _routes(inboxes: Iterable[Inbox]) -> list[Routes]:
    return [routes for inbox in inboxes for routes in inbox.chosen([]).values()]


def _holds_sagas(target: str) -> bool:
    module, name = imported(target, "inbox", "shop.handlers:inbox")
    return is_sagas(getattr(module, name, None))


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """Return what a script sees.

    >>> exit_code([Finding(Level.WARN, "kafka-replication", "one copy", "add brokers")], strict=True)
    1
    """
    refused = {finding.check for finding in findings if finding.level is Level.REFUSE}
    if refused & {"store-answers", "broker-answers"}:
        return UNREACHABLE
    return FINDING if refused or (strict and worst(findings) is Level.WARN) else 0


def _show(findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("level")
    table.add_column("check", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        told = finding.text + (f"\n→ {finding.remedy}" if finding.remedy else "")
        table.add_row(Text(finding.level, STYLES[finding.level]), finding.check, told)
    console().print(table)
    count = Counter(finding.level for finding in findings)
    say(f"{count[Level.REFUSE]} refused, {count[Level.WARN]} warned about, {count[Level.OK]} fine")
