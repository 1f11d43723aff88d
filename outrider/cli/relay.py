"""`outrider relay`: publishes staged events, in one process or in several.

The first SIGTERM or SIGINT starts a clean stop, which may take as long as a lease. The second signal ends the process
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

import typer

from outrider import app, config
from outrider.cli import processes
from outrider.cli.imports import find_payloads, find_topic_rule
from outrider.cli.options import BrokerUrl, ConfigFile, Json, LogLevel, SchemaName, StoreUrl, number
from outrider.cli.output import CHECK_RESULT, emit, say
from outrider.cli.processes import collect_rarely, die_with_parent, on_stop_signals
from outrider.config import Config
from outrider.errors import Transient
from outrider.outbox.model import WAITING
from outrider.outbox.relay import Relay
from outrider.outbox.store import OutboxAdmin
from outrider.telemetry.events import EventDeadLettered, Observer, Observers, PassCompleted, TelemetryEvent
from outrider.waker import StagedObserver, Waker

LOOK_SECONDS = 0.2

LOOK_SHARE = 10

NOTIFIED = ("postgresql", "postgres")
"""Schemes of the stores that send notifications; on other stores a relay sees every commit."""

IsDue = Callable[[], Awaitable[bool]]


def relay(
    *,
    config_file: ConfigFile = None,
    store: StoreUrl = None,
    broker: BrokerUrl = None,
    schema: SchemaName = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Relays to run side by side; 1 unless set.")
    ] = None,
    until_empty: Annotated[
        bool,
        typer.Option(
            "--until-empty", help="Stop when nothing is due. Exits with 1 if an event was dead-lettered or waits."
        ),
    ] = False,
    archive: Annotated[
        bool | None,
        typer.Option("--archive/--no-archive", help="Keep delivered events for a while (the default), or delete them."),
    ] = None,
    topic_rule: Annotated[
        str | None,
        typer.Option("--topic-rule", help="The function that names the topic of rows without one, as module:function."),
    ] = None,
    lease_seconds: Annotated[float | None, number("lease_seconds")] = None,
    publish_timeout_seconds: Annotated[float | None, number("publish_timeout_seconds")] = None,
    batch_max: Annotated[int | None, number("batch_max")] = None,
    in_flight_max: Annotated[int | None, number("in_flight_max")] = None,
    workers: Annotated[int | None, number("workers")] = None,
    poll_seconds_min: Annotated[float | None, number("poll_seconds_min")] = None,
    poll_seconds_max: Annotated[float | None, number("poll_seconds_max")] = None,
    breaker_seconds_base: Annotated[float | None, number("breaker_seconds_base")] = None,
    breaker_seconds_max: Annotated[float | None, number("breaker_seconds_max")] = None,
    maintenance_interval_seconds: Annotated[float | None, number("maintenance_interval_seconds")] = None,
    log_level: LogLevel = None,
    json: Json = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Publish staged events until stopped. Every option is also a variable, such as OUTRIDER_LEASE_SECONDS."""
    names = ("store", "broker", "schema", "processes", "archive", "topic_rule", "log_level", *config.RELAY_NUMBERS)
    given = locals()
    chosen = config.load({"config": config_file, **{name: given[name] for name in names}})
    check_settings(chosen)
    app.configure_logging(json=json, level=chosen.log_level.upper())
    if parent is not None:
        die_with_parent(parent)
    tally = asyncio.run(_relayed(chosen, until_empty=until_empty, json=json))
    # A child only counts: the parent adds up the results of its children, and decides about the exit code.
    child = parent is not None
    if until_empty and not child:
        asyncio.run(_count_waiting(chosen, tally))
    emit(tally.facts()) if json or child else say(str(tally))
    if until_empty and not child and tally.unfinished:
        raise typer.Exit(CHECK_RESULT)


async def _relayed(chosen: Config, *, until_empty: bool, json: bool) -> RelayTally:
    if chosen.processes > 1:
        options = processes.child_options(until_empty=until_empty, as_json=json)
        return RelayTally(**await processes.supervise(chosen, options))
    return await run(chosen, until_empty=until_empty)


async def _count_waiting(chosen: Config, tally: RelayTally) -> None:
    store = await app.open_store(chosen.store_url(), schema=chosen.schema)
    try:
        await tally.count_waiting(store.admin)
    finally:
        await store.close()


async def run(chosen: Config, *, until_empty: bool) -> RelayTally:
    """Run one relay until it stops; return its counts."""
    tally = RelayTally()
    async with _open_relay(chosen, Observers([app.log_observer(), tally])) as relay:
        with on_stop_signals(relay.stop, shutdown_seconds=chosen.relay.lease_seconds), collect_rarely():
            async with stop_when_empty(relay.store.admin, relay, enabled=until_empty):
                await relay.run()
    return tally


@asynccontextmanager
async def run_beside(
    chosen: Config, observer: Observer, staged: StagedObserver, *, enabled: bool
) -> AsyncIterator[IsDue]:
    """While the block runs, run a relay in this process; yield a function that tells whether an event is due.

    Staged events wake the relay; without one, they wake the relays of other processes. A fatal error of the relay ends
    the block, and is raised. The relay stops cleanly after the block, and also after an error of the block.
    """
    if not enabled:
        async with _waking(chosen, staged):
            yield _nothing_due
        return
    async with _open_relay(chosen, observer) as relay, asyncio.TaskGroup() as group:
        staged.wake = relay.wake
        running = group.create_task(relay.run())
        try:
            yield partial(_something_due, relay.store.admin)
        finally:
            relay.stop()
            await asyncio.wait([running])


@asynccontextmanager
async def _waking(chosen: Config, staged: StagedObserver) -> AsyncIterator[None]:
    """Send notifications, where relays do not notice a commit by themselves as fast."""
    if urlsplit(url := chosen.store_url()).scheme not in NOTIFIED:
        yield
        return
    staged.wake = waker = Waker(url, schema=chosen.schema)
    try:
        yield
    finally:
        await asyncio.to_thread(waker.close)


@asynccontextmanager
async def _open_relay(chosen: Config, observer: Observer) -> AsyncIterator[Relay]:
    broker = await app.open_broker(chosen.broker_url())
    rule, payloads = find_topic_rule(chosen.topic_rule), find_payloads(chosen.payloads)
    store = await app.open_store(
        chosen.store_url(),
        schema=chosen.schema,
        archive=chosen.archive,
        topic_rule=rule,
        concurrency=chosen.relay.workers,
    )
    try:
        yield Relay(store, broker, chosen.relay, observer=observer, payloads=payloads)
    finally:
        await broker.close()
        await store.close()


def check_settings(chosen: Config) -> None:
    """Check the settings of a relay before anything starts: a supervisor must not restart one that cannot work."""
    chosen.store_url(), chosen.broker_url()
    find_topic_rule(chosen.topic_rule)
    find_payloads(chosen.payloads)


@asynccontextmanager
async def stop_when_empty(admin: OutboxAdmin, relay: Relay, *, enabled: bool) -> AsyncIterator[None]:
    """While the block runs, look for due events, and stop the relay when no event is due."""
    watching = asyncio.create_task(_watch(admin, relay)) if enabled else None
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _watch(admin: OutboxAdmin, relay: Relay) -> None:
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        if not await _something_due(admin):
            relay.stop()
            return
        # Counting a large backlog takes a while, and the database is there for the relay.
        await asyncio.sleep(max(LOOK_SECONDS, LOOK_SHARE * (loop.time() - started)))


async def _nothing_due() -> bool:
    return False


async def _something_due(admin: OutboxAdmin) -> bool:
    # Events that wait for their time or for a person are not due, nor are the events behind them.
    try:
        return await admin.has_due()
    except Transient:  # Unknown, so go on; the relay itself reports a failing store.
        return True


@dataclass(slots=True)
class RelayTally:
    """Counts confirmed and dead-lettered events; `waiting` is counted by the store, when the relay has stopped.

    >>> str(RelayTally(confirmed=1, dead_lettered=2, waiting=0))
    '1 event confirmed, 2 dead-lettered; see: outrider dead-letters list'
    """

    confirmed: int = 0
    dead_lettered: int = 0
    waiting: int | None = None

    def emit(self, event: TelemetryEvent) -> None:
        """Add up confirmed and dead-lettered events."""
        if isinstance(event, PassCompleted):
            self.confirmed += event.confirmed
        elif isinstance(event, EventDeadLettered):
            self.dead_lettered += 1

    async def count_waiting(self, admin: OutboxAdmin) -> None:
        """Count failed, deferred and parked events. Pending events were staged after the relay found no more work."""
        counts = await admin.counts(sent=False)
        self.waiting = sum(counts.get(state, 0) for state in WAITING)

    @property
    def unfinished(self) -> bool:
        """Tell whether events are left undelivered."""
        return bool(self.dead_lettered or self.waiting)

    def facts(self) -> dict[str, int]:
        """Return the counts for programs."""
        return {name: count for name, count in asdict(self).items() if count is not None}

    def __str__(self) -> str:
        parts = [f"{self.confirmed} event{'' if self.confirmed == 1 else 's'} confirmed"]
        parts += [f"{self.dead_lettered} dead-lettered"] if self.dead_lettered else []
        parts += [f"{self.waiting} waiting"] if self.waiting else []
        looks = ["outrider dead-letters list"] if self.dead_lettered else []
        looks += ["outrider events list"] if self.waiting else []
        return ", ".join(parts) + (f"; see: {', '.join(looks)}" if looks else "")
