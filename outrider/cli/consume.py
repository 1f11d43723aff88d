"""`outrider consume`: runs the handlers of an inbox, so that every event has its effect exactly once.

With `--relay`, a relay runs beside them, so that a small service is one process.

The first SIGTERM or SIGINT starts a clean stop: running handlers are committed and acked, other deliveries stay with
the broker. The second signal ends the process at once, at the price of repeated deliveries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from outrider import app, config
from outrider.cli.imports import find_inbox, find_payloads
from outrider.cli.options import BrokerUrl, ConfigFile, Json, LogLevel, SchemaName, StoreUrl, WithRelay
from outrider.cli.output import emit, say
from outrider.cli.processes import die_with_parent, on_stop_signals
from outrider.cli.relay import IsDue, check_settings, run_beside
from outrider.config import Config
from outrider.errors import UsageError
from outrider.inbox.consumer import Consumer
from outrider.inbox.router import Routes
from outrider.telemetry.events import (
    ConsumerDeadLettered,
    ConsumerStarted,
    ConsumerStopped,
    Handled,
    Observers,
    PassCompleted,
    RelayStarted,
    TelemetryEvent,
)
from outrider.waker import StagedObserver

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="Where the inbox is, such as shop.handlers:inbox.")]
NAMES = {
    "applied": "applied",
    "duplicates": "duplicates",
    "dropped": "dropped",
    "no_handler": "without a handler",
    "erased": "of erased subjects",
    "waiting": "waiting",
    "dead_lettered": "dead-lettered",
    "unhandled": "not handled yet",
}
PUBLISHED = "published"
"""The count of events that the relay beside the consumers has published."""


class ConsumerTally:
    """Counts messages by their outcome, and events that a relay beside the consumers has published."""

    def __init__(self, *, relay: bool) -> None:
        self.counts = dict.fromkeys([*NAMES, *([PUBLISHED] if relay else [])], 0)
        self.started = 0
        self.last_error = asyncio.Event()

    def emit(self, event: TelemetryEvent) -> None:
        """Add up outcomes and started components."""
        if isinstance(event, ConsumerStarted | RelayStarted):
            self.started += 1
            self.last_error.set()
        elif isinstance(event, PassCompleted) and event.confirmed:
            self.counts[PUBLISHED] += event.confirmed
            self.last_error.set()
        elif isinstance(event, Handled):
            for name in ("applied", "duplicates", "dropped", "waiting", "no_handler", "erased"):
                self.counts[name] += getattr(event, name)
            self.last_error.set()
        elif isinstance(event, ConsumerDeadLettered):
            self.counts["dead_lettered"] += 1
        elif isinstance(event, ConsumerStopped):
            self.counts["unhandled"] += event.unhandled


def consume(
    target: Target,
    *,
    config_file: ConfigFile = None,
    store: StoreUrl = None,
    broker: BrokerUrl = None,
    schema: SchemaName = None,
    consumer: Annotated[
        list[str] | None, typer.Option("--consumer", help="Only this consumer; may be repeated. Default: all.")
    ] = None,
    until_idle: Annotated[
        float | None,
        typer.Option("--until-idle", min=0.1, metavar="SECONDS", help="Stop when no message has come for this time."),
    ] = None,
    relay: WithRelay = False,
    log_level: LogLevel = None,
    json: Json = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Run handlers until stopped."""
    if parent is not None:
        die_with_parent(parent)
    given = {"store": store, "broker": broker, "schema": schema, "log_level": log_level}
    chosen = config.load({"config": config_file, **given})
    if relay:
        check_settings(chosen)
    app.configure_logging(json=json, level=chosen.log_level.upper())
    inbox = find_inbox(target)
    routes = list(inbox.select(consumer or []).values())
    for each in routes:
        each.payloads = each.payloads or find_payloads(chosen.payloads)
        if "error_text" in chosen.origins:
            each.settings = replace(each.settings, error_text=chosen.relay.error_text)
    if not routes:
        raise UsageError(f"{target} has no handlers; register some with @inbox.handler(...)")
    counts = asyncio.run(run(chosen, routes, until_idle, inbox.transactions, relay=relay))
    emit(counts) if json else say(", ".join(f"{count} {NAMES.get(name, name)}" for name, count in counts.items()))


async def run(
    chosen: Config, routes: Sequence[Routes], until_idle: float | None, transactions: Any = None, *, relay: bool = False
) -> dict[str, int]:
    """Run one consumer per name until it stops, and a relay if wanted; return the counts of messages by outcome."""
    concurrency = sum(each.settings.concurrency for each in routes)
    options = {"transactions": transactions, "concurrency": concurrency}
    store = await app.open_inbox(chosen.store_url(), schema=chosen.schema, **options)
    tally = ConsumerTally(relay=relay)
    staged = StagedObserver()
    observer = Observers([app.log_observer(), tally, staged])
    try:
        consumers = [
            Consumer(app.open_source(chosen.broker_url(), each), store, each, observer=observer) for each in routes
        ]
        # Twice, because the source needs time to leave as well.
        seconds = 2 * max(each.settings.shutdown_timeout_seconds for each in routes)
        async with run_beside(chosen, observer, staged, enabled=relay) as is_due:
            watch = _idle(tally, consumers, until_idle, is_due) if until_idle else None
            await _run(consumers, watch, seconds + (chosen.relay.lease_seconds if relay else 0))
    finally:
        await store.close()
    return tally.counts


async def _run(consumers: Sequence[Consumer], watch: Coroutine[Any, Any, None] | None, shutdown_seconds: float) -> None:
    def stop() -> None:
        for consumer in consumers:
            consumer.stop()

    with on_stop_signals(stop, shutdown_seconds=shutdown_seconds):
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(consumer.run()) for consumer in consumers]
            if watch:
                watching = group.create_task(watch)
                await asyncio.wait([watching, *running], return_when=asyncio.FIRST_COMPLETED)
                watching.cancel()
                stop()


async def _idle(tally: ConsumerTally, consumers: Sequence[Consumer], seconds: float, is_due: IsDue) -> None:
    # Counted from the start of the last component: connecting may take a while.
    members = len(consumers) + (PUBLISHED in tally.counts)
    while True:
        tally.last_error.clear()
        try:
            async with asyncio.timeout(seconds if tally.started >= members else None):
                await tally.last_error.wait()
        except TimeoutError:
            # A running handler, or one that is to be retried, emits no event meanwhile.
            if not any(consumer.busy for consumer in consumers) and not await is_due():
                return
