"""`outrider consume`: runs the handlers of an inbox, so that every event has its effect exactly once.

The first SIGTERM or SIGINT starts a clean stop: running handlers are committed and acked, other deliveries stay with
the broker. The second signal ends the process at once, at the price of repeated deliveries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outrider import app, config
from outrider.cli.imports import find_inbox
from outrider.cli.options import BrokerUrl, ConfigFile, Json, LogLevel, SchemaName, StoreUrl
from outrider.cli.output import emit, say
from outrider.cli.processes import die_with_parent, on_stop_signals
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
    TelemetryEvent,
)

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="Where the inbox is, such as shop.handlers:inbox.")]
NAMES = {
    "applied": "applied",
    "duplicates": "duplicates",
    "dropped": "dropped",
    "no_handler": "without a handler",
    "waiting": "waiting",
    "dead_lettered": "dead-lettered",
    "unhandled": "not handled yet",
}


class ConsumerTally:
    """Counts messages by their outcome."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(NAMES, 0)
        self.started = 0
        self.last_error = asyncio.Event()

    def emit(self, event: TelemetryEvent) -> None:
        """Add up outcomes and started consumers."""
        if isinstance(event, ConsumerStarted):
            self.started += 1
            self.last_error.set()
        elif isinstance(event, Handled):
            for name in ("applied", "duplicates", "dropped", "waiting", "no_handler"):
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
    log_level: LogLevel = None,
    json: Json = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Run handlers until stopped."""
    if parent is not None:
        die_with_parent(parent)
    given = {"store": store, "broker": broker, "schema": schema, "log_level": log_level}
    chosen = config.load({"config": config_file, **given})
    app.configure_logging(json=json, level=chosen.log_level.upper())
    inbox = find_inbox(target)
    routes = list(inbox.select(consumer or []).values())
    if not routes:
        raise UsageError(f"{target} has no handlers; register some with @inbox.handler(...)")
    counts = asyncio.run(run(chosen, routes, until_idle, inbox.transactions))
    emit(counts) if json else say(", ".join(f"{count} {NAMES[name]}" for name, count in counts.items()))


async def run(
    chosen: Config, routes: Sequence[Routes], until_idle: float | None, transactions: Any = None
) -> dict[str, int]:
    """Run one consumer per name until it stops; return the counts of messages by outcome."""
    store = await app.open_inbox(chosen.store_url(), schema=chosen.schema, transactions=transactions)
    tally = ConsumerTally()
    observer = Observers([app.log_observer(), tally])
    try:
        consumers = [
            Consumer(app.open_source(chosen.broker_url(), each), store, each, observer=observer) for each in routes
        ]
        await _run(consumers, tally, until_idle, max(each.settings.shutdown_timeout_seconds for each in routes))
    finally:
        await store.close()
    return tally.counts


async def _run(
    consumers: Sequence[Consumer], tally: ConsumerTally, until_idle: float | None, shutdown_timeout_seconds: float
) -> None:
    def stop() -> None:
        for consumer in consumers:
            consumer.stop()

    # Twice, because the source needs time to leave as well.
    with on_stop_signals(stop, shutdown_seconds=2 * shutdown_timeout_seconds):
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(consumer.run()) for consumer in consumers]
            watching = group.create_task(_idle(tally, consumers, until_idle)) if until_idle else None
            if watching:
                await asyncio.wait([watching, *running], return_when=asyncio.FIRST_COMPLETED)
                watching.cancel()
                stop()


async def _idle(tally: ConsumerTally, consumers: Sequence[Consumer], seconds: float) -> None:
    # Counted from the start of the last consumer: connecting may take a while.
    while True:
        tally.last_error.clear()
        try:
            async with asyncio.timeout(seconds if tally.started >= len(consumers) else None):
                await tally.last_error.wait()
        except TimeoutError:
            # A running handler, or one that is to be retried, emits no event meanwhile.
            if not any(consumer.busy for consumer in consumers):
                return
