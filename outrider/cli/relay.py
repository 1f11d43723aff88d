"""`outrider relay`: publish what is staged, in one process or several.

The first SIGTERM or SIGINT asks for a clean stop, which may take as long as a lease. The second ends the process at
once.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from outrider import app, config
from outrider.cli import supervisor
from outrider.cli.errors import FINDING
from outrider.cli.numbers import number
from outrider.cli.options import BrokerUrl, ConfigFile, Json, LogLevel, SchemaName, StoreUrl
from outrider.cli.output import emit, say
from outrider.cli.process import collecting_rarely, die_with_parent, on_stop_signals
from outrider.cli.tally import Tally
from outrider.cli.until_empty import stop_when_empty
from outrider.config import Config
from outrider.observer import Observers
from outrider.outbox.relay import Relay


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
        typer.Option("--until-empty", help="Stop when nothing is due. Exits with 1 if an event was buried or waits."),
    ] = False,
    archive: Annotated[
        bool | None,
        typer.Option("--archive/--no-archive", help="Keep delivered events for a while (the default), or delete them."),
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
    upkeep_seconds: Annotated[float | None, number("upkeep_seconds")] = None,
    log_level: LogLevel = None,
    json: Json = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Publish staged events until told to stop. Each setting is also a variable, such as OUTRIDER_LEASE_SECONDS."""
    names = ("store", "broker", "schema", "processes", "archive", "log_level", *config.RELAY_NUMBERS)
    given = locals()
    chosen = config.load({"config": config_file, **{name: given[name] for name in names}})
    _check(chosen)
    app.configure_logging(json=json, level=chosen.log_level.upper())
    if parent is not None:
        die_with_parent(parent)
    tally = asyncio.run(_relayed(chosen, until_empty=until_empty, json=json))
    # A child only counts: its parent adds up what all have done, and decides what that is worth.
    child = parent is not None
    if until_empty and not child:
        asyncio.run(_ask(chosen, tally))
    emit(tally.facts()) if json or child else say(str(tally))
    if until_empty and not child and tally.unfinished:
        raise typer.Exit(FINDING)


async def _relayed(chosen: Config, *, until_empty: bool, json: bool) -> Tally:
    """Relay in one process or several; return what was done."""
    if chosen.processes > 1:
        options = supervisor.child_options(until_empty=until_empty, as_json=json)
        return Tally(**await supervisor.supervise(chosen, options))
    return await run(chosen, until_empty=until_empty)


async def _ask(chosen: Config, tally: Tally) -> None:
    """Let the tally count what stays behind."""
    store = await app.open_store(chosen.store_url(), schema=chosen.schema)
    try:
        await tally.ask(store.desk)
    finally:
        await store.close()


async def run(chosen: Config, *, until_empty: bool) -> Tally:
    """Run one relay to its end; return what it did."""
    broker = await app.open_broker(chosen.broker_url())
    store = await app.open_store(chosen.store_url(), schema=chosen.schema, archive=chosen.archive)
    tally = Tally()
    relay = Relay(store, broker, chosen.relay, observer=Observers([app.log_observer(), tally]))
    try:
        with on_stop_signals(relay.stop, give_up_seconds=chosen.relay.lease_seconds), collecting_rarely():
            async with stop_when_empty(store.desk, relay, enabled=until_empty):
                await relay.run()
    finally:
        await broker.close()
        await store.close()
    return tally


def _check(chosen: Config) -> None:
    """Ask for both URLs before anything starts, so that a supervisor does not restart what cannot work."""
    chosen.store_url(), chosen.broker_url()
