"""The results, for people and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import mongo
from bench.brokers import Arena, Score
from bench.idle import Lone, Rest
from bench.inbox import InboxResult
from bench.latency import Latency
from bench.load import Drain
from bench.saga import Rate
from bench.staging import Cost
from bench.targets import TargetResult

CLIENTS = ("asyncpg", "confluent-kafka", "aio-pika", "pymongo")
COST_COLUMNS = ("client", "database", "broker", "all")


@dataclass(slots=True)
class Report:
    """What was measured, part by part."""

    drains: list[Drain] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    payload_costs: list[Cost] = field(default_factory=list)
    field_costs: list[Cost] = field(default_factory=list)
    journal_costs: dict[str, list[Cost]] = field(default_factory=dict)
    brokers: list[tuple[Arena, list[Score]]] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    lone: list[Lone] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    inbox_results: list[InboxResult] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    mongo_drains: list[mongo.Rate] = field(default_factory=list)
    mongo_costs: list[Cost] = field(default_factory=list)
    results: list[TargetResult] = field(default_factory=list)

    @property
    def met(self) -> bool:
        """Tell whether every target was met."""
        return all(result.met for result in self.results)

    def plain(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "machine": machine(),
            "drain": [_plain_drain(drain) for drain in self.drains],
            "ratios": self.ratios,
            "staging": dict(self.costs),
            "payload": dict(self.payload_costs),
            "fields": dict(self.field_costs),
            "journal": {part: dict(costs) for part, costs in self.journal_costs.items()},
            "brokers": {
                arena.name.lower(): [_plain_score(score) for score in scores] for arena, scores in self.brokers
            },
            "latency": [_plain(latency) for latency in self.latencies],
            "idle": {"lone": [_plain(row) for row in self.lone], "rest": [_plain(row) for row in self.rests]},
            "inbox": [_plain(handled) for handled in self.inbox_results],
            "saga": [_plain(rate) for rate in self.rates],
            "mongo": {"drain": [_plain(rate) for rate in self.mongo_drains], "staging": dict(self.mongo_costs)},
            "targets": [{**result._asdict(), "met": result.met} for result in self.results],
        }

    def _field_pairs(self) -> list[list[Cost]]:
        """Return each cost with sensitive fields behind the cost without any."""
        return [self.field_costs[at : at + 2] for at in range(0, len(self.field_costs), 2)]

    def show(self, console: Console) -> None:
        """Print tables, and the results of the targets last."""
        tables = [
            *([_drain_table(self.drains, self.ratios)] if self.drains else []),
            *([_cost_table(self.costs)] if self.costs else []),
            *([_cost_table(self.payload_costs, "relay, own time per event")] if self.payload_costs else []),
            *(
                _cost_table(pair, "an event, in its application")
                for pair in (self.field_costs[:2], self.field_costs[2:])
                if pair
            ),
            *(_cost_table(costs, f"{part}, CPU per event") for part, costs in self.journal_costs.items()),
            *(_score_table(arena, scores) for arena, scores in self.brokers),
            *([_latency_table(self.latencies)] if self.latencies else []),
            *([_lone_table(self.lone), _rest_table(self.rests)] if self.lone else []),
            *([_inbox_table(self.inbox_results)] if self.inbox_results else []),
            *([_rate_table(self.rates)] if self.rates else []),
            *([_mongo_table(self.mongo_drains)] if self.mongo_drains else []),
            *([_cost_table(self.mongo_costs)] if self.mongo_costs else []),
        ]
        for table in tables:
            console.print(table)
        for result in self.results:
            console.print(str(result), highlight=False)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in CLIENTS},
    }


def _drain_table(drains: Sequence[Drain], ratios: dict[str, float]) -> Table:
    table = Table("design", "held open meanwhile", "events", "events/s", "WAL bytes/event", "times textbook")
    for drain in drains:
        ratio = str(ratios.get(drain.design, "")) if drain.open_transaction == "none" else ""
        rate, wal = f"{drain.events_per_second:,.0f}", f"{drain.wal_bytes_per_event:,.0f}"
        table.add_row(drain.design, drain.open_transaction, f"{drain.events:,}", rate, wal, ratio)
    return table


def _cost_table(costs: Sequence[Cost], what: str = "transaction") -> Table:
    table = Table(what, "µs", "added µs", "share")
    plain = costs[0].microseconds
    for cost in costs:
        added = cost.microseconds - plain
        table.add_row(cost.what, f"{cost.microseconds:,.1f}", f"{added:,.1f}", f"{added / plain:.0%}")
    return table


def _score_table(arena: Arena, scores: Sequence[Score]) -> Table:
    table = Table(f"to {arena.name}", "events/s", f"times {arena.rival}", *(f"CPU µs {who}" for who in COST_COLUMNS))
    for score in scores:
        ratio = score.times(scores)
        costs = score.cpu_microseconds
        spent = (f"{costs[who]:,.1f}" if who in costs else "" for who in COST_COLUMNS)
        table.add_row(score.what, f"{score.events_per_second:,.0f}", f"{ratio:.2f}", *spent)
    return table


def _latency_table(latencies: Sequence[Latency]) -> Table:
    table = Table("commit to confirm", "broker", "p50 ms", "p99 ms")
    for latency in latencies:
        table.add_row(
            latency.runner, latency.broker, f"{latency.p50_milliseconds:,.1f}", f"{latency.p99_milliseconds:,.1f}"
        )
    return table


def _lone_table(rows: Sequence[Lone]) -> Table:
    table = Table("a lone event, commit to confirm", "writer", "commit after the insert", "events", "p50 ms", "p99 ms")
    for row in rows:
        table.add_row(*row[:3], str(row.events), f"{row.p50_milliseconds:,.1f}", f"{row.p99_milliseconds:,.1f}")
    return table


def _rest_table(rests: Sequence[Rest]) -> Table:
    table = Table("an idle relay", "% of a core database", "relay", "transactions/s", "log bytes/min")
    for rest in rests:
        table.add_row(rest.store, *("" if figure is None else f"{figure:,.2f}" for figure in rest[1:]))
    return table


def _inbox_table(inbox_results: Sequence[InboxResult]) -> Table:
    table = Table("consuming from memory", "at once", "messages/s", "times bare")
    for handled in inbox_results:
        rate = f"{handled.messages_per_second:,.0f}"
        table.add_row(handled.what, str(handled.workers), rate, f"{handled.times_bare:.2f}")
    return table


def _rate_table(rates: Sequence[Rate]) -> Table:
    table = Table(
        "sagas of three steps", "at once", "sagas/s", "step p50 ms", "step p99 ms", "CPU ms client", "database"
    )
    for rate in rates:
        table.add_row(rate.what, str(rate.workers), *(f"{figure:,.1f}" for figure in rate[3:]))
    return table


def _mongo_table(rates: Sequence[mongo.Rate]) -> Table:
    first = rates[0]
    table = Table("MongoDB to nowhere", "events", "events/s", f"times {first.design}", "CPU µs client", "database")
    for rate in rates:
        ratio = rate.events_per_second / first.events_per_second
        costs = (f"{rate.cpu_microseconds_client:,.1f}", f"{rate.cpu_microseconds_database:,.1f}")
        table.add_row(rate.design, f"{rate.events:,}", f"{rate.events_per_second:,.0f}", f"{ratio:.1f}", *costs)
    return table


def _plain_drain(drain: Drain) -> dict[str, Any]:
    rates = {"events_per_second": round(drain.events_per_second), "wal_bytes": round(drain.wal_bytes_per_event)}
    return {"design": drain.design, "held_open": drain.open_transaction, "events": drain.events, **rates}


def _plain_score(score: Score) -> dict[str, Any]:
    costs = {client: round(cost, 1) for client, cost in score.cpu_microseconds.items()}
    rate = round(score.events_per_second)
    return {
        "what": score.what,
        "own_core": score.apart,
        "events": score.events,
        "events_per_second": rate,
        "cpu_microseconds": costs,
    }


def _plain(measured: Latency | Lone | Rest | InboxResult | Rate | mongo.Rate) -> dict[str, Any]:
    fields = measured._asdict()
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in fields.items()}
