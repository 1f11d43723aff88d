"""Run the benchmarks: `make bench`, or `python -m bench --json`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import staging, throughput
from bench.load import Drain
from outrider.testing.servers import PostgresServer

TARGET_RATIO = 10
SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}


def main() -> int:
    """Measure, print, and tell by the exit code whether the target was met."""
    options = _options()
    with PostgresServer(fsync=True, settings=SETTINGS) as server:
        drains = asyncio.run(throughput.run(server.url, options.events, options.seconds))
        costs = asyncio.run(staging.run(server.url, options.transactions))
    ratios = _ratios(drains)
    if options.json:
        print(json.dumps({"drain": [_plain(d) for d in drains], "ratios": ratios, "staging": dict(costs)}))
    else:
        _show(drains, ratios, costs)
    return 0 if _met(ratios) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--events", type=int, default=100_000, help="backlog of each drain")
    parser.add_argument("--seconds", type=float, default=60, help="give up on a drain after this long")
    parser.add_argument("--transactions", type=int, default=1_000, help="transactions of each kind in the staging part")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def _ratios(drains: list[Drain]) -> dict[str, float]:
    """Every design over the textbook's, row by row, with nothing held open."""
    ours = [drain for drain in drains if drain.held == "none"]
    textbook = ours[0]
    return {drain.design: round(drain.events_per_second / textbook.events_per_second, 1) for drain in ours}


def _met(ratios: dict[str, float]) -> bool:
    return all(ratio >= TARGET_RATIO for design, ratio in ratios.items() if design.startswith("outrider"))


def _plain(drain: Drain) -> dict[str, Any]:
    rates = {"events_per_second": round(drain.events_per_second), "wal_bytes": round(drain.wal_bytes_per_event)}
    return {"design": drain.design, "held_open": drain.held, "events": drain.events, **rates}


def _show(drains: list[Drain], ratios: dict[str, float], costs: list[staging.Cost]) -> None:
    console = Console(file=sys.stdout)
    table = Table("design", "held open meanwhile", "events", "events/s", "WAL bytes/event", "times textbook")
    for drain in drains:
        ratio = str(ratios.get(drain.design, "")) if drain.held == "none" else ""
        rate, wal = f"{drain.events_per_second:,.0f}", f"{drain.wal_bytes_per_event:,.0f}"
        table.add_row(drain.design, drain.held, f"{drain.events:,}", rate, wal, ratio)
    console.print(table)
    table = Table("transaction", "µs", "added µs")
    for cost in costs:
        table.add_row(cost.what, f"{cost.microseconds:,.0f}", f"{cost.microseconds - costs[0].microseconds:,.0f}")
    console.print(table)
    verdict = "met" if _met(ratios) else "MISSED"
    console.print(f"target: outrider at least {TARGET_RATIO} times the textbook, row by row: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
