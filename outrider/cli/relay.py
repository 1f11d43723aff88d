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
from outrider.cli.options import BrokerUrl, ConfigFile, Json, LogLevel, SchemaName, StoreUrl
from outrider.cli.output import emit, say
from outrider.cli.process import collecting_rarely, die_with_parent, on_stop_signals
from outrider.cli.until_empty import stop_when_empty
from outrider.config import Config
from outrider.observer import Fact, Observers, Passed
from outrider.outbox.relay import Relay

Seconds = Annotated[float | None, typer.Option(show_default=False)]
Count = Annotated[int | None, typer.Option(show_default=False)]


class Tally:
    """Counts what was confirmed."""

    def __init__(self) -> None:
        self.confirmed = 0

    def notice(self, fact: Fact) -> None:
        """Add up passes."""
        if isinstance(fact, Passed):
            self.confirmed += fact.confirmed


def relay(
    *,
    config_file: ConfigFile = None,
    store: StoreUrl = None,
    broker: BrokerUrl = None,
    schema: SchemaName = None,
    processes: Annotated[int | None, typer.Option("--processes", help="Relays to run side by side.")] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="Stop when nothing is left that is due; good for scripts.")
    ] = False,
    archive: Annotated[
        bool | None,
        typer.Option("--archive/--no-archive", help="Keep delivered events for a while, or delete them at once."),
    ] = None,
    lease_seconds: Seconds = None,
    publish_timeout_seconds: Seconds = None,
    batch_max: Count = None,
    in_flight_max: Count = None,
    workers: Count = None,
    poll_seconds_min: Seconds = None,
    poll_seconds_max: Seconds = None,
    breaker_seconds_base: Seconds = None,
    breaker_seconds_max: Seconds = None,
    upkeep_seconds: Seconds = None,
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
    if chosen.processes > 1:
        options = supervisor.child_options(until_empty=until_empty, json=json)
        raise typer.Exit(asyncio.run(supervisor.supervise(chosen, options)))
    if parent is not None:
        die_with_parent(parent)
    confirmed = asyncio.run(run(chosen, until_empty=until_empty))
    emit({"confirmed": confirmed}) if json else say(f"{confirmed} event{'' if confirmed == 1 else 's'} confirmed")


async def run(chosen: Config, *, until_empty: bool) -> int:
    """Run one relay to its end; return how many events it confirmed."""
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
    return tally.confirmed


def _check(chosen: Config) -> None:
    """Ask for both URLs before anything starts, so that a supervisor does not restart what cannot work."""
    chosen.store_url(), chosen.broker_url()
