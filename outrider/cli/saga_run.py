"""`outrider saga run`: runs the steps of sagas, and receives replies and events for sagas.

With `--relay`, a relay runs in the same process and publishes what the steps stage.

The first SIGTERM or SIGINT starts a clean stop: running calls may finish, and every saga is released. The second signal
ends the process at once; other workers continue when the claims expire, and call again with the same keys.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Annotated, Any, Protocol

import typer

from outrider import app, config
from outrider.cli.imports import find_payloads, find_sagas
from outrider.cli.options import BrokerUrl, ConfigFile, Json, LogLevel, SchemaName, StoreUrl, WithRelay
from outrider.cli.output import emit, say
from outrider.cli.processes import die_with_parent, on_stop_signals, supervise
from outrider.cli.relay import IsDue, check_settings, run_beside
from outrider.cli.saga_operator import Target
from outrider.config import Config
from outrider.inbox.consumer import Consumer
from outrider.inbox.inbox import Inbox
from outrider.saga.definition.saga import SagaRegistry
from outrider.saga.execution.worker import SagaWorker
from outrider.saga.settings import SagaSettings
from outrider.telemetry.events import (
    ConsumerStarted,
    Handled,
    Observer,
    Observers,
    PassCompleted,
    RelayStarted,
    SagaAdvanced,
    SagaEnded,
    SagaWorkerRecovered,
    SagaWorkerStarted,
    SagaWorkerUnavailable,
    TelemetryEvent,
)
from outrider.waker import StagedObserver

Concurrency = Annotated[int | None, typer.Option(help="Number of sagas that a worker runs at a time.")]
Lease = Annotated[float | None, typer.Option(help="Seconds until a claim ends that is not renewed.")]
PollMin = Annotated[float | None, typer.Option(help="Seconds between two polls of a busy worker.")]
PollMax = Annotated[float | None, typer.Option(help="Seconds between two polls of an idle worker.")]
Stop = Annotated[float | None, typer.Option(help="Seconds that a clean stop waits for running calls.")]
MaintenanceInterval = Annotated[float | None, typer.Option(help="Seconds between two runs of maintenance.")]
SagaDays = Annotated[float | None, typer.Option(help="Days for which ended sagas are kept.")]
AuditDays = Annotated[float | None, typer.Option(help="Days for which audit logs are kept.")]
ParticipantMemoryDays = Annotated[float | None, typer.Option(help="Days for which a participant remembers commands.")]
BreakerFailures = Annotated[
    int | None, typer.Option(help="Unavailable results of a step in a row after which sagas wait at the step.")
]
BreakerBase = Annotated[float | None, typer.Option(help="Seconds until an unavailable service is tried again.")]
BreakerMax = Annotated[float | None, typer.Option(help="The longest such time; it doubles with each failed probe.")]
AuditStates = Annotated[
    bool | None,
    typer.Option("--audit-states/--no-audit-states", help="Keep changed states in the audit log (the default)."),
]
NUMBERS = tuple(field.name for field in fields(SagaSettings))


class WorkerProcess(Protocol):
    """A component that runs until asked to stop."""

    def stop(self) -> None: ...
    async def run(self) -> None: ...


class SagaTally:
    """Counts the outcomes of sagas and the events that a relay beside the worker has published; tracks activity."""

    def __init__(self, *, relay: bool) -> None:
        self.counts = {"moved": 0, "completed": 0, "compensated": 0, "failed": 0, **({"published": 0} if relay else {})}
        self.started = 0
        self.unavailable = False
        self.last_error = asyncio.Event()

    def emit(self, event: TelemetryEvent) -> None:
        """Add up turns and ended sagas."""
        match event:
            case SagaAdvanced():
                self.counts["moved"] += 1
            case SagaEnded():
                self.counts[event.status] += 1
            case SagaWorkerUnavailable() | SagaWorkerRecovered():
                self.unavailable = isinstance(event, SagaWorkerUnavailable)
            case PassCompleted() if event.confirmed:
                self.counts["published"] += event.confirmed
            case SagaWorkerStarted() | ConsumerStarted() | RelayStarted():
                self.started += 1
            case Handled():
                pass
            case _:
                return
        self.last_error.set()


def run(
    target: Target,
    *,
    config_file: ConfigFile = None,
    store: StoreUrl = None,
    broker: BrokerUrl = None,
    schema: SchemaName = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Workers to run side by side.")] = 1,
    until_idle: Annotated[
        float | None,
        typer.Option("--until-idle", min=0.1, metavar="SECONDS", help="Stop when no saga has advanced for this time."),
    ] = None,
    concurrency: Concurrency = None,
    lease_seconds: Lease = None,
    poll_seconds_min: PollMin = None,
    poll_seconds_max: PollMax = None,
    shutdown_timeout_seconds: Stop = None,
    maintenance_interval_seconds: MaintenanceInterval = None,
    saga_days: SagaDays = None,
    audit_days: AuditDays = None,
    participant_memory_days: ParticipantMemoryDays = None,
    breaker_failures: BreakerFailures = None,
    breaker_seconds_base: BreakerBase = None,
    breaker_seconds_max: BreakerMax = None,
    audit_states: AuditStates = None,
    relay: WithRelay = False,
    log_level: LogLevel = None,
    json: Json = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Run sagas until stopped, and receive their replies from the broker, if there are any."""
    numbers = {name: value for name, value in locals().items() if name in NUMBERS and value is not None}
    if parent is not None:
        die_with_parent(parent)
    given = {"store": store, "broker": broker, "schema": schema, "log_level": log_level}
    chosen = config.load({"config": config_file, **given})
    sagas, settings = find_sagas(target), SagaSettings(**numbers, error_text=chosen.relay.error_text)
    sagas.payloads = sagas.payloads or find_payloads(chosen.payloads)
    _check(chosen, sagas)
    if relay:
        check_settings(chosen)
    app.configure_logging(json=json, level=chosen.log_level.upper())
    if processes > 1:
        options = child_options(numbers, until_idle=until_idle, relay=relay, json=json)
        workers, seconds = replace(chosen, processes=processes), shutdown_seconds(settings, chosen, relay=relay)
        counts = asyncio.run(supervise(workers, options, ("saga", "run", target), shutdown_timeout_seconds=seconds))
    else:
        counts = asyncio.run(run_once(chosen, sagas, settings, until_idle, relay=relay))
    # A child only counts: the parent adds up the results of its children.
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    emit(counts) if json or parent is not None else say(said)


def child_options(numbers: dict[str, Any], *, until_idle: float | None, relay: bool, json: bool) -> list[str]:
    """Return the options of a child; URLs and schema come through the environment.

    >>> child_options({"lease_seconds": 20.0}, until_idle=5, relay=False, json=False)
    ['--lease-seconds', '20.0', '--until-idle', '5']
    """
    named = {**numbers, **({} if until_idle is None else {"until_idle": until_idle})}
    options = {name.replace("_", "-"): value for name, value in named.items()}
    switches = [f"--{name}" if value else f"--no-{name}" for name, value in options.items() if isinstance(value, bool)]
    pairs = [(f"--{name}", str(value)) for name, value in options.items() if not isinstance(value, bool)]
    flags = {"--relay": relay, "--json": json}
    return [*(text for pair in pairs for text in pair), *switches, *(flag for flag, wanted in flags.items() if wanted)]


def shutdown_seconds(settings: SagaSettings, chosen: Config, *, relay: bool) -> float:
    """Return the time limit of a clean stop: for calls, releasing sagas, the sources of replies, and the relay."""
    seconds = 2 * settings.shutdown_timeout_seconds + settings.lease_seconds
    return seconds + (chosen.relay.lease_seconds if relay else 0)


async def run_once(
    chosen: Config, sagas: SagaRegistry, settings: SagaSettings, until_idle: float | None, *, relay: bool
) -> dict[str, int]:
    """Run one worker, the consumers of its replies, and a relay if wanted, until they stop; return the counts."""
    tally = SagaTally(relay=relay)
    staged = StagedObserver()
    observer = Observers([app.log_observer(), tally, staged])
    outbox = app.Outbox(schema=chosen.schema, payloads=sagas.payloads)
    options = {"transactions": sagas.transactions, "concurrency": settings.concurrency}
    store = await app.open_sagas(chosen.store_url(), schema=chosen.schema, **options)
    try:
        worker = SagaWorker(store, sagas, outbox.stage, settings, observer)
        inbox = app.saga_inbox(sagas, outbox=outbox, observer=observer)
        # The worker is notified by the consumers: handled replies are messages for its sagas.
        async with (
            _consumers(chosen, inbox, Observers([observer, worker])) as consumers,
            run_beside(chosen, observer, staged, enabled=relay) as is_due,
        ):
            members = 1 + len(consumers) + relay
            watch = _idle(worker, tally, members, until_idle, is_due) if until_idle else None
            await _run(worker, consumers, watch, shutdown_seconds(settings, chosen, relay=relay))
    finally:
        await store.close()
    return tally.counts


@asynccontextmanager
async def _consumers(chosen: Config, inbox: Inbox, observer: Observer) -> AsyncIterator[list[Consumer]]:
    """Make the consumers of replies. Sagas without replies need neither consumers nor a broker."""
    routes = list(inbox.select([]).values())
    for each in routes:
        each.settings = replace(each.settings, error_text=chosen.relay.error_text)
    if not routes:
        yield []
        return
    concurrency = sum(each.settings.concurrency for each in routes)
    store = await app.open_inbox(chosen.store_url(), schema=chosen.schema, concurrency=concurrency)
    try:
        sources = [app.open_source(chosen.broker_url(), each) for each in routes]
        yield [Consumer(*made, observer=observer) for made in zip(sources, [store] * len(routes), routes, strict=True)]
    finally:
        await store.close()


async def _run(
    worker: SagaWorker, consumers: Sequence[Consumer], watch: Coroutine[Any, Any, None] | None, seconds: float
) -> None:
    members: list[WorkerProcess] = [worker, *consumers]

    def stop() -> None:
        for member in members:
            member.stop()

    with on_stop_signals(stop, shutdown_seconds=seconds):
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(member.run()) for member in members]
            if watch:
                watching = group.create_task(watch)
                await asyncio.wait([watching, *running], return_when=asyncio.FIRST_COMPLETED)
                watching.cancel()
                stop()
    if worker.leaked:
        # A call that ignores its cancellation cannot be ended, and the event loop would wait for ever.
        asyncio.get_running_loop().call_later(worker.settings.shutdown_timeout_seconds, os._exit, 1)


async def _idle(worker: SagaWorker, tally: SagaTally, members: int, seconds: float, is_due: IsDue) -> None:
    """Return when all components have started, no activity came for the given time, and the worker is idle."""
    while True:
        tally.last_error.clear()
        ready = tally.started >= members and not tally.unavailable
        try:
            async with asyncio.timeout(seconds if ready else None):
                await tally.last_error.wait()
        except TimeoutError:
            if not worker.busy and not await is_due():
                return


def _check(chosen: Config, sagas: SagaRegistry) -> None:
    """Check the URLs of store and broker before the start: a supervisor must not restart a worker that cannot work."""
    chosen.store_url()
    if app.saga_inbox(sagas).consumers:
        chosen.broker_url()
