"""Examining store and broker as relays and consumers would use them. What goes wrong on the way is a finding too."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence

from outrider import app
from outrider.broker import Broker, Retaining
from outrider.config import Config, hidden, redacted
from outrider.errors import OutriderError, Transient
from outrider.finding import Finding, Level, ok, refuse, warn
from outrider.inbox.router import Routes
from outrider.source import Examining

SIDE_SECONDS_MAX = 60.0
TOPICS_MAX = 1000
"""Topics that are examined at most."""

CHECKS = {
    "store-answers": "the database can be reached",
    "store-usable": "the settings of the store make sense, and a relay could use it",
    "store-schema": "every migration has been run",
    "broker-answers": "the broker can be reached",
    "broker-usable": "the settings of the broker make sense, and do not weaken the promise",
    "relay-publish-timeout": "the relay waits for as long as the broker needs to give its verdict",
    "receipts-shorter-than-retention": "a consumer's receipts outlive what the broker may deliver again",
}
_ORDER = (Level.REFUSE, Level.WARN, Level.OK)


async def examine(
    chosen: Config, topics: Iterable[str] = (), consumers: Sequence[Routes] = (), of_sagas: Sequence[Routes] = ()
) -> list[Finding]:
    """Examine both sides, for the topics given, configured, consumed and staged; the worst comes first.

    A reply that is read again after its receipt is gone does no harm to a saga, so receipts of those do not matter.
    """
    of_store, staged = await _store(chosen)
    consumed = [topic for routes in (*consumers, *of_sagas) for topic in routes.topics]
    named = list(dict.fromkeys([*chosen.topics, *topics, *consumed, *staged]))[:TOPICS_MAX]
    found = [*of_store, *await _broker(chosen, named, consumers, of_sagas)]
    return sorted((_clean(finding) for finding in found), key=lambda finding: _ORDER.index(finding.level))


def worst(findings: Sequence[Finding]) -> Level:
    """Return how bad it is altogether.

    >>> worst([ok("a", "fine"), warn("b", "odd", "look")])
    <Level.WARN: 'warn'>
    """
    return min((finding.level for finding in findings), key=_ORDER.index, default=Level.OK)


async def _store(chosen: Config) -> tuple[list[Finding], list[str]]:
    found: list[Finding] = []
    try:
        async with asyncio.timeout(SIDE_SECONDS_MAX):
            url = chosen.store_url()
            steps = await app.open_schema(url, schema=chosen.schema).plan()
            found += [ok("store-answers", hidden(url)), judge_schema(len(steps))]
            if steps:
                return found, []
            store = await app.open_store(url, schema=chosen.schema, archive=chosen.archive)
            try:
                found += [ok("store-usable", "a relay can open it"), *await store.examine()]
                return found, await store.desk.topics(TOPICS_MAX)
            finally:
                await store.close()
    except (OutriderError, TimeoutError) as error:
        return [*found, judge_error("store", error)], []


async def _broker(
    chosen: Config, topics: Sequence[str], consumers: Sequence[Routes], of_sagas: Sequence[Routes]
) -> list[Finding]:
    try:
        async with asyncio.timeout(SIDE_SECONDS_MAX):
            url = chosen.broker_url()
            broker = await app.open_broker(url)
            try:
                found = [*await broker.examine(topics), *await _receipts(broker, consumers)]
                found += await _sources(url, [*consumers, *of_sagas])
            finally:
                await broker.close()
    except (OutriderError, TimeoutError) as error:
        return [judge_error("broker", error)]
    waits = judge_timeout(chosen.relay.publish_timeout_seconds, broker.traits.publish_seconds)
    return [ok("broker-answers", hidden(url)), ok("broker-usable", "a relay can use it"), waits, *found]


async def _sources(url: str, consumers: Sequence[Routes]) -> list[Finding]:
    """Look at what each consumer has of its own on the broker, where it has something."""
    sources = [app.open_source(url, routes) for routes in consumers]
    return [found for source in sources if isinstance(source, Examining) for found in await source.examine()]


async def _receipts(broker: Broker, consumers: Sequence[Routes]) -> list[Finding]:
    """Compare receipts with what the broker keeps. One that keeps nothing after the ack delivers nothing again."""
    if not isinstance(broker, Retaining):
        return []
    kept = await broker.retention_days(sorted({topic for routes in consumers for topic in routes.topics}))
    of_each = [(routes, {topic: kept[topic] for topic in routes.topics if topic in kept}) for routes in consumers]
    return [judge_receipts(routes.consumer, routes.settings.receipt_days, days) for routes, days in of_each if days]


def judge_receipts(consumer: str, receipt_days: float, kept_days: Mapping[str, float]) -> Finding:
    """Judge whether an event could come again when its receipt is gone.

    >>> judge_receipts("billing", 14, {"orders": 30}).remedy
    'set it for the consumer: receipt_days=30; or keep the topic for a shorter time'
    """
    topic, longest = max(kept_days.items(), key=lambda pair: pair[1])
    known = math.isfinite(longest)
    kept = f"for {longest:g} days" if known else "for ever"
    text = f"{consumer} keeps receipts for {receipt_days:g} days, and {topic} is kept {kept}"
    if receipt_days >= longest:
        return ok("receipts-shorter-than-retention", text)
    # Rounded up to hundredths, so that following the advice is enough.
    raised = f"set it for the consumer: receipt_days={math.ceil(longest * 100) / 100:g}; or " if known else ""
    remedy = f"{raised}keep the topic for a shorter time"
    text += ": what is read again after that has its effect again"
    return warn("receipts-shorter-than-retention", text, remedy)


def judge_schema(steps: int) -> Finding:
    """Judge whether the store is installed.

    >>> judge_schema(3).text
    '3 steps of the migrations are still to be run'
    """
    if not steps:
        return ok("store-schema", "up to date")
    text = f"{steps} steps of the migrations are still to be run"
    return refuse("store-schema", text, "run: outrider db migrate")


def judge_timeout(relay_seconds: float, broker_seconds: float) -> Finding:
    """Judge who gives up first.

    >>> judge_timeout(5.0, 4.0).level
    <Level.OK: 'ok'>
    """
    check = "relay-publish-timeout"
    if relay_seconds > broker_seconds:
        return ok(check, f"{relay_seconds:g} s")
    text = f"the relay gives up after {relay_seconds:g} s, and the broker may need {broker_seconds:g} s to say what is "
    return warn(check, f"{text}down: then everything waits instead", f"set it to more than {broker_seconds:g}")


def judge_error(side: str, error: Exception) -> Finding:
    """Turn an error into a finding; ours say what happened, and behind the last semicolon what to do.

    >>> judge_error("store", Transient("nobody answers; is it running?")).remedy
    'is it running?'
    """
    if isinstance(error, TimeoutError):
        return refuse(f"{side}-answers", f"no end within {SIDE_SECONDS_MAX:g} s", "check the server and the network")
    check = f"{side}-answers" if isinstance(error, Transient) else f"{side}-usable"
    text, separator, remedy = str(error).rpartition("; ")
    return refuse(check, text if separator else remedy, remedy if separator else f"check the settings of the {side}")


def _clean(finding: Finding) -> Finding:
    """Hide what a driver may have repeated of a URL."""
    return Finding(finding.level, finding.check, redacted(finding.text), redacted(finding.remedy))
