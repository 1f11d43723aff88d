"""`outrider config`: the settings in force, and where each comes from."""

from __future__ import annotations

from typing import Any

import typer

from outrider.cli.options import BrokerUrl, ConfigFile, Json, SchemaName, StoreUrl
from outrider.cli.output import emit, show_table
from outrider.config import Config, hidden, load, values

app = typer.Typer(help="Look at the settings.", no_args_is_help=True)
PLACES = ("store", "broker")


@app.callback()
def group() -> None:
    """Look at the settings."""


@app.command("show")
def show(
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    broker: BrokerUrl = None,
    schema: SchemaName = None,
    json: Json = False,
) -> None:
    """Show every setting in force and where it comes from; secrets are hidden."""
    rows = effective(load({"config": config, "store": store, "broker": broker, "schema": schema}))
    emit(rows) if json else show_table(["setting", "value", "from"], rows, empty="no settings")


def effective(chosen: Config) -> list[dict[str, Any]]:
    """List the settings with their origins.

    >>> effective(load({"schema": "shop"}, {}))[2]
    {'setting': 'schema', 'value': 'shop', 'from': '--schema'}
    """
    return [
        {"setting": path, "value": _shown(path, value), "from": chosen.origins.get(path, "default")}
        for path, value in values(chosen).items()
    ]


def _shown(path: str, value: Any) -> Any:
    if path in PLACES and value:
        return hidden(value)
    return list(value) if isinstance(value, tuple) else value
