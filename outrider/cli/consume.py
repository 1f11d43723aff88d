"""`outrider consume`: run the handlers of an inbox, so that each event has its effect exactly once.

The first SIGTERM or SIGINT asks for a clean stop: what is being handled is committed and acked, the rest stays with the
broker. The second ends the process at once, which costs nothing but repeated deliveries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outrider import app, config
from outrider.cli.options import BrokerUrl, ConfigFile, Json, LogLevel, SchemaName, StoreUrl
from outrider.cli.output import emit, say
from outrider.cli.process import die_with_parent, on_stop_signals
from outrider.cli.target import find_inbox
from outrider.config import Config
from outrider.errors import Misuse
from outrider.inbox.consumer import Consumer
from outrider.inbox.router import Routes
from outrider.observer import ConsumerBuried, ConsumerStarted, ConsumerStopped, Fact, Handled, Observers

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="Where the inbox is, such as shop.handlers:inbox.")]
NAMES = {
    "applied": "applied",
    "duplicates": "duplicates",
    "dropped": "dropped",
    "no_handler": "without a handler",
    "waiting": "waiting",
    "buried": "buried",
    "unhandled": "not handled yet",
}


class Tally:
    """Counts what became of messages."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(NAMES, 0)
        self.begun = 0
        self.heard = asyncio.Event()

    def notice(self, fact: Fact) -> None:
        """Add up transactions, and consumers that have begun."""
        if isinstance(fact, ConsumerStarted):
            self.begun += 1
            self.heard.set()
        elif isinstance(fact, Handled):
            for name in ("applied", "duplicates", "dropped", "waiting", "no_handler"):
                self.counts[name] += getattr(fact, name)
            self.heard.set()
        elif isinstance(fact, ConsumerBuried):
            self.counts["buried"] += 1
        elif isinstance(fact, ConsumerStopped):
            self.counts["unhandled"] += fact.unhandled


def consume(
    target: Target,
    *,
    config_file: ConfigFile = None,
    store: StoreUrl = None,
    broker: BrokerUrl = None,
    schema: SchemaName = None,
    consumer: Annotated[
        list[str] | None, typer.Option("--consumer", help="Only this one; may be repeated. Default: all.")
    ] = None,
    until_idle: Annotated[
        float | None,
        typer.Option("--until-idle", min=0.1, metavar="SECONDS", help="Stop when nothing has come for so long."),
    ] = None,
    log_level: LogLevel = None,
    json: Json = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Run handlers until told to stop."""
    if parent is not None:
        die_with_parent(parent)
    given = {"store": store, "broker": broker, "schema": schema, "log_level": log_level}
    chosen = config.load({"config": config_file, **given})
    app.configure_logging(json=json, level=chosen.log_level.upper())
    inbox = find_inbox(target)
    routes = list(inbox.chosen(consumer or []).values())
    if not routes:
        raise Misuse(f"{target} has no handlers; register some with @inbox.handler(...)")
    counts = asyncio.run(run(chosen, routes, until_idle, inbox.transactions))
    emit(counts) if json else say(", ".join(f"{count} {NAMES[name]}" for name, count in counts.items()))


async def run(
    chosen: Config, routes: Sequence[Routes], until_idle: float | None, transactions: Any = None
) -> dict[str, int]:
    """Run one consumer per name to its end; return what became of the messages."""
    store = await app.open_inbox(chosen.store_url(), schema=chosen.schema, transactions=transactions)
    tally = Tally()
    observer = Observers([app.log_observer(), tally])
    try:
        consumers = [
            Consumer(app.open_source(chosen.broker_url(), each), store, each, observer=observer) for each in routes
        ]
        await _run(consumers, tally, until_idle, max(each.settings.stop_seconds for each in routes))
    finally:
        await store.close()
    return tally.counts


async def _run(consumers: Sequence[Consumer], tally: Tally, until_idle: float | None, stop_seconds: float) -> None:
    def stop() -> None:
        for consumer in consumers:
            consumer.stop()

    # Twice: the source takes a while to leave, too.
    with on_stop_signals(stop, give_up_seconds=2 * stop_seconds):
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(consumer.run()) for consumer in consumers]
            watching = group.create_task(_idle(tally, consumers, until_idle)) if until_idle else None
            if watching:
                await asyncio.wait([watching, *running], return_when=asyncio.FIRST_COMPLETED)
                watching.cancel()
                stop()


async def _idle(tally: Tally, consumers: Sequence[Consumer], seconds: float) -> None:
    """Return when all have begun, and then nothing was there to handle for so long: connecting may take a while."""
    while True:
        tally.heard.clear()
        try:
            async with asyncio.timeout(seconds if tally.begun >= len(consumers) else None):
                await tally.heard.wait()
        except TimeoutError:
            # What is being handled, or will be tried again, is not heard of meanwhile.
            if not any(consumer.busy for consumer in consumers):
                return
