"""`outrider demo`: shows the guarantees while relays and consumers are killed; needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Json
from outrider.cli.output import CHECK_RESULT


def demo(
    *,
    orders: Annotated[
        int, typer.Option("--orders", min=500, max=100_000, help="Orders to commit, 500 at least.")
    ] = 4000,
    keys: Annotated[int, typer.Option("--keys", min=1, help="Customers; order is kept for each.")] = 200,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep the databases; else a temporary directory.")
    ] = None,
    json: Json = False,
) -> None:
    """Commit orders, kill relays and consumers while events flow, then count lost and repeated effects."""
    from outrider.demo import run

    if not run(orders=orders, keys=keys, directory=directory, as_json=json):
        raise typer.Exit(CHECK_RESULT)
