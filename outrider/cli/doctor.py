"""`outrider doctor`: checks that store, broker and settings can keep the guarantees."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from outrider import app
from outrider.app import saga_inbox
from outrider.brokers.base import Broker, HasRetention, SupportsChecks
from outrider.checks import CheckResult, Level, fail, ok, warn
from outrider.cli import journal as journal_check
from outrider.cli.imports import find_inbox, find_sagas, find_topic_rule, imported, is_sagas
from outrider.cli.options import BrokerUrl, ConfigFile, Json, SchemaName, StoreUrl
from outrider.cli.output import CHECK_RESULT, UNREACHABLE, console, emit, say
from outrider.config import Config, hidden, load, redacted
from outrider.errors import OutriderError, Transient
from outrider.inbox.inbox import Inbox
from outrider.inbox.router import Routes
from outrider.redaction import without_values

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.ERROR: "bold red"}

SIDE_SECONDS_MAX = 60.0

TOPICS_MAX = 1000
"""The most topics that are checked."""

CHECKS = {
    "store-answers": "the database can be reached",
    "store-usable": "the settings of the store are valid, and a relay could use the store",
    "store-schema": "every migration has been run",
    "broker-answers": "the broker can be reached",
    "broker-usable": "the settings of the broker are valid, and keep the guarantees",
    "relay-publish-timeout": "the relay waits longer than the broker needs to confirm or reject",
    "receipts-shorter-than-retention": "a consumer keeps receipts longer than the broker keeps messages",
}

_ORDER = (Level.ERROR, Level.WARN, Level.OK)


def doctor(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    broker: BrokerUrl = None,
    schema: SchemaName = None,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Check this topic too, besides the topics of staged events.")
    ] = None,
    consume: Annotated[
        list[str] | None,
        typer.Option("--consume", metavar="MODULE:NAME", help="Check the consumers of this inbox too."),
    ] = None,
    sagas: Annotated[
        list[str] | None,
        typer.Option("--sagas", metavar="MODULE:NAME", help="Check the topics and consumers of these sagas too."),
    ] = None,
    journal: Annotated[
        bool, typer.Option("--journal", help="Compare outbox, archive and dead letters with the journal instead.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on a warning as well.")] = False,
    json: Json = False,
) -> None:
    """Check store and broker, and suggest remedies; changes nothing. Exits with 1 on an error, 3 if unreachable."""
    chosen = load({"config": config, "store": store, "broker": broker, "schema": schema})
    if journal:
        _compare_journal(chosen, strict=strict, as_json=json)
    with_sagas = [target for target in consume or () if _has_sagas(target)]
    known = [find_sagas(target) for target in [*(sagas or ()), *with_sagas]]
    consumers = _routes(find_inbox(target) for target in consume or () if target not in with_sagas)
    named = [*(topic or ()), *(name for each in known for name in each.topics)]
    results = asyncio.run(check(chosen, named, consumers, _routes(map(saga_inbox, known))))
    if json:
        emit({"level": worst(results), "results": [asdict(result) for result in results]})
    else:
        _show(results)
    raise typer.Exit(exit_code(results, strict=strict))


def _compare_journal(chosen: Config, *, strict: bool, as_json: bool) -> None:
    report, result = journal_check.check(chosen, as_json=as_json)
    if as_json:
        emit(journal_check.facts(report, result))
    else:
        journal_check.show(report, result)
    raise typer.Exit(exit_code([result], strict=strict))


def _routes(inboxes: Iterable[Inbox]) -> list[Routes]:
    return [routes for inbox in inboxes for routes in inbox.select([]).values()]


def _has_sagas(target: str) -> bool:
    module, name = imported(target, "inbox", "shop.handlers:inbox")
    return is_sagas(getattr(module, name, None))


def exit_code(results: Sequence[CheckResult], *, strict: bool) -> int:
    """Return the exit code for check results.

    >>> exit_code([CheckResult(Level.WARN, "kafka-replication", "one copy", "add brokers")], strict=True)
    1
    """
    failed = {result.check for result in results if result.level is Level.ERROR}
    if failed & {"store-answers", "broker-answers"}:
        return UNREACHABLE
    return CHECK_RESULT if failed or (strict and worst(results) is Level.WARN) else 0


def _show(results: Sequence[CheckResult]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("level")
    table.add_column("check", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for result in results:
        text = result.text + (f"\n→ {result.remedy}" if result.remedy else "")
        table.add_row(Text(result.level, STYLES[result.level]), result.check, text)
    console().print(table)
    count = Counter(result.level for result in results)
    say(f"{count[Level.ERROR]} wrong, {count[Level.WARN]} warned about, {count[Level.OK]} fine")


async def check(
    chosen: Config, topics: Iterable[str] = (), consumers: Sequence[Routes] = (), saga_topics: Sequence[Routes] = ()
) -> list[CheckResult]:
    """Check store and broker for the given, configured, consumed and staged topics; errors come first.

    Receipts of sagas are not checked: a saga ignores a reply that is delivered again.
    """
    store_topics, staged = await _store(chosen)
    consumed = [topic for routes in (*consumers, *saga_topics) for topic in routes.topics]
    named = list(dict.fromkeys([*chosen.topics, *topics, *consumed, *staged]))[:TOPICS_MAX]
    found = [*store_topics, *await _broker(chosen, named, consumers, saga_topics)]
    return sorted((_clean(result) for result in found), key=lambda result: _ORDER.index(result.level))


def worst(results: Sequence[CheckResult]) -> Level:
    """Return the worst level of check results.

    >>> worst([ok("a", "fine"), warn("b", "odd", "look")])
    <Level.WARN: 'warn'>
    """
    return min((result.level for result in results), key=_ORDER.index, default=Level.OK)


async def _store(chosen: Config) -> tuple[list[CheckResult], list[str]]:
    found: list[CheckResult] = []
    try:
        async with asyncio.timeout(SIDE_SECONDS_MAX):
            url = chosen.store_url()
            steps = await app.open_schema(url, schema=chosen.schema).plan()
            found += [ok("store-answers", hidden(url)), check_schema(len(steps))]
            if steps:
                return found, []
            rule = find_topic_rule(chosen.topic_rule)
            store = await app.open_store(url, schema=chosen.schema, archive=chosen.archive, topic_rule=rule)
            try:
                found += [ok("store-usable", "a relay can open it"), *await store.check()]
                return found, await store.admin.topics(TOPICS_MAX)
            finally:
                await store.close()
    except (OutriderError, TimeoutError) as error:
        return [*found, error_result("store", error)], []


async def _broker(
    chosen: Config, topics: Sequence[str], consumers: Sequence[Routes], saga_topics: Sequence[Routes]
) -> list[CheckResult]:
    try:
        async with asyncio.timeout(SIDE_SECONDS_MAX):
            url = chosen.broker_url()
            broker = await app.open_broker(url)
            try:
                found = [*await broker.check(topics), *await _receipts(broker, consumers)]
                found += await _sources(url, [*consumers, *saga_topics])
            finally:
                await broker.close()
    except (OutriderError, TimeoutError) as error:
        return [error_result("broker", error)]
    waits = check_timeout(chosen.relay.publish_timeout_seconds, broker.capabilities.publish_seconds)
    return [ok("broker-answers", hidden(url)), ok("broker-usable", "a relay can use it"), waits, *found]


async def _sources(url: str, consumers: Sequence[Routes]) -> list[CheckResult]:
    sources = [app.open_source(url, routes) for routes in consumers]
    return [found for source in sources if isinstance(source, SupportsChecks) for found in await source.check()]


async def _receipts(broker: Broker, consumers: Sequence[Routes]) -> list[CheckResult]:
    # A broker without retention deletes a message with its ack, and cannot deliver it again.
    if not isinstance(broker, HasRetention):
        return []
    retention = await broker.retention_days(sorted({topic for routes in consumers for topic in routes.topics}))
    by_consumer = [
        (routes, {topic: retention[topic] for topic in routes.topics if topic in retention}) for routes in consumers
    ]
    return [check_receipts(routes.consumer, routes.settings.receipt_days, days) for routes, days in by_consumer if days]


def check_receipts(consumer: str, receipt_days: float, retention_days: Mapping[str, float]) -> CheckResult:
    """Check that receipts are kept as long as the messages of the topics.

    >>> check_receipts("billing", 14, {"orders": 30}).remedy
    'set it for the consumer: receipt_days=30; or keep the topic for a shorter time'
    """
    topic, longest = max(retention_days.items(), key=lambda pair: pair[1])
    known = math.isfinite(longest)
    retention = f"for {longest:g} days" if known else "for ever"
    text = f"{consumer} keeps receipts for {receipt_days:g} days, and {topic} is kept {retention}"
    if receipt_days >= longest:
        return ok("receipts-shorter-than-retention", text)
    # Rounded up to hundredths, so that following the advice is enough.
    raised = f"set it for the consumer: receipt_days={math.ceil(longest * 100) / 100:g}; or " if known else ""
    remedy = f"{raised}keep the topic for a shorter time"
    text += ": a message that is delivered again after that has its effect again"
    return warn("receipts-shorter-than-retention", text, remedy)


def check_schema(steps: int) -> CheckResult:
    """Check that no migration is pending.

    >>> check_schema(3).text
    '3 steps of the migrations are still to be run'
    """
    if not steps:
        return ok("store-schema", "up to date")
    text = f"{steps} steps of the migrations are still to be run"
    return fail("store-schema", text, "run: outrider db migrate")


def check_timeout(relay_seconds: float, broker_seconds: float) -> CheckResult:
    """Check that the relay waits longer than the broker.

    >>> check_timeout(5.0, 4.0).level
    <Level.OK: 'ok'>
    """
    check = "relay-publish-timeout"
    if relay_seconds > broker_seconds:
        return ok(check, f"{relay_seconds:g} s")
    text = f"the relay gives up after {relay_seconds:g} s, and the broker may need {broker_seconds:g} s to say what is "
    return warn(check, f"{text}down: then everything waits instead", f"set it to more than {broker_seconds:g}")


def error_result(side: str, error: Exception) -> CheckResult:
    """Return an error as a check result; the text behind the last semicolon is the remedy.

    >>> error_result("store", Transient("no answer; is the server running?")).remedy
    'is the server running?'
    """
    if isinstance(error, TimeoutError):
        return fail(f"{side}-answers", f"no end within {SIDE_SECONDS_MAX:g} s", "check the server and the network")
    check = f"{side}-answers" if isinstance(error, Transient) else f"{side}-usable"
    text, separator, remedy = without_values(error).rpartition("; ")
    return fail(check, text if separator else remedy, remedy if separator else f"check the settings of the {side}")


def _clean(result: CheckResult) -> CheckResult:
    # A driver may repeat a URL in its errors.
    return CheckResult(result.level, result.check, redacted(result.text), redacted(result.remedy))
