"""Run the benchmarks: `make bench`, or `python -m bench --only kafka,latency --json`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from bench import brokers, idle, inbox, journal, latency, mongo, payload, saga, staging, targets, throughput
from bench.report import Report
from outrider.brokers.null import NullBroker
from outrider.testing.servers import KafkaServer, MongoServer, PostgresServer, RabbitServer

SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}


class Bench:
    """The parts. Servers are started by the first part that needs them, and shared."""

    def __init__(self, options: argparse.Namespace, servers: ExitStack) -> None:
        self._options, self._servers = options, servers
        self.report = Report()

    @cached_property
    def postgres(self) -> PostgresServer:
        """PostgreSQL that waits for its disk."""
        return self._servers.enter_context(PostgresServer(fsync=True, settings=SETTINGS))

    @cached_property
    def mongodb(self) -> MongoServer:
        """MongoDB, a replica set of one node."""
        return self._servers.enter_context(MongoServer())

    @cached_property
    def kafka_arena(self) -> brokers.Arena:
        """Kafka, with the topic made."""
        return brokers.kafka(self._servers.enter_context(KafkaServer()))

    @cached_property
    def rabbitmq_arena(self) -> brokers.Arena:
        """RabbitMQ."""
        return brokers.rabbitmq(self._servers.enter_context(RabbitServer()))

    def throughput(self) -> None:
        """A backlog to nowhere: the textbook design beside ours."""
        drains = asyncio.run(throughput.run(self.postgres.url, self._options.events, self._options.seconds))
        self.report.drains, self.report.ratios = drains, targets.textbook_ratios(drains)
        self.report.results.append(targets.against_textbook(self.report.ratios))

    def staging(self) -> None:
        """What staging adds to a transaction."""
        self.report.costs = asyncio.run(staging.run(self.postgres.url, self._options.transactions))

    def payload(self) -> None:
        """What checks of payloads add to the relay's own time, and what a journal adds to staging and relaying."""
        options = self._options
        self.report.payload_costs = asyncio.run(payload.run(self.postgres.url, options.events // 4, options.rounds))
        self.report.field_costs = payload.fields(options.events // 4, options.rounds)
        self.report.journal_costs = asyncio.run(journal.run(self.postgres, options.events // 4, options.rounds))
        self.report.results.append(targets.against_plain(self.report.payload_costs, self.report.field_costs))

    def kafka(self) -> None:
        """A backlog to Kafka."""
        self._broker(self.kafka_arena, self._options.events)

    def rabbitmq(self) -> None:
        """A backlog to RabbitMQ, which takes fewer events in the same time."""
        self._broker(self.rabbitmq_arena, self._options.events // 3)

    def latency(self) -> None:
        """From commit to confirm."""
        options = self._options
        kinds = {"none": NullBroker, "Kafka": self.kafka_arena.adapter, "RabbitMQ": self.rabbitmq_arena.adapter}
        measuring = latency.run(self.postgres.url, kinds, per_second=options.rate, seconds=options.latency_seconds)
        self.report.latencies = asyncio.run(measuring)

    def idle(self) -> None:
        """A lone event on an idle system, on every store, and the cost of rest."""
        options, folder = self._options, Path(self._servers.enter_context(TemporaryDirectory()))
        measuring = idle.run(
            self.postgres, self.mongodb, folder, events=options.idle_events, rest_seconds=options.rest_seconds
        )
        self.report.lone, self.report.rests = asyncio.run(measuring)

    def inbox(self) -> None:
        """Consuming from memory: the inbox beside a bare loop."""
        options = self._options
        self.report.inbox_results = asyncio.run(inbox.run(self.postgres.url, options.messages, options.rounds))

    def saga(self) -> None:
        """Sagas of three steps: ours beside DBOS."""
        options = self._options
        self.report.rates = asyncio.run(saga.run(self.postgres, options.sagas, options.workers, options.rounds))

    def mongo(self) -> None:
        """MongoDB: a backlog to nowhere, one document at a time beside ours; and what staging adds."""
        options, server = self._options, self.mongodb
        self.report.mongo_drains = asyncio.run(mongo.drains(server, options.events // 3, options.seconds))
        self.report.mongo_costs = asyncio.run(mongo.staging(server, options.transactions // 5))
        self.report.results.append(targets.against_one_by_one(self.report.mongo_drains))

    def _broker(self, arena: brokers.Arena, events: int) -> None:
        options = self._options
        measuring = brokers.run(arena, self.postgres, events=events, keys=options.keys, rounds=options.rounds)
        scores = asyncio.run(measuring)
        self.report.brokers.append((arena, scores))
        self.report.results += targets.against_rival(arena, scores)


PARTS: dict[str, Callable[[Bench], None]] = {
    "throughput": Bench.throughput,
    "staging": Bench.staging,
    "payload": Bench.payload,
    "kafka": Bench.kafka,
    "rabbitmq": Bench.rabbitmq,
    "latency": Bench.latency,
    "idle": Bench.idle,
    "inbox": Bench.inbox,
    "saga": Bench.saga,
    "mongo": Bench.mongo,
}


def main() -> int:
    """Measure, print, and tell by the exit code whether every target was met."""
    options = _options()
    with ExitStack() as servers:
        bench = Bench(options, servers)
        for name in options.only:
            PARTS[name](bench)
    if options.json:
        print(json.dumps(bench.report.plain()))
    else:
        bench.report.show(Console(file=sys.stdout))
    return 0 if bench.report.met else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parts = f"parts to run, with commas between: {', '.join(PARTS)}"
    parser.add_argument("--only", type=_parts, default=tuple(PARTS), help=parts)
    events = "backlog of each drain; a third of it for RabbitMQ and MongoDB"
    parser.add_argument("--events", type=int, default=200_000, help=events)
    parser.add_argument("--seconds", type=float, default=5, help="give up on a drain to nowhere after this long")
    parser.add_argument("--transactions", type=int, default=1_000, help="transactions of each kind in the staging part")
    parser.add_argument("--keys", type=int, default=5_000, help="keys of the backlog for Kafka and RabbitMQ")
    parser.add_argument("--rounds", type=int, default=3, help="rounds for brokers, inbox and sagas; the median counts")
    parser.add_argument("--rate", type=float, default=200, help="events per second in the latency part")
    parser.add_argument("--latency-seconds", type=float, default=3, help="how long each runner is measured")
    lone = "lone events of each row that commits at once in the idle part; a third as many late ones"
    parser.add_argument("--idle-events", type=int, default=30, help=lone)
    parser.add_argument("--rest-seconds", type=float, default=10, help="how long the cost of rest is measured")
    parser.add_argument(
        "--messages", type=int, default=250, help="messages to the inbox one by one; many more in batches"
    )
    parser.add_argument("--sagas", type=int, default=500, help="sagas of each kind in a round")
    parser.add_argument("--workers", type=int, default=32, help="sagas at a time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no part (valid: {', '.join(PARTS)})")
    return names


if __name__ == "__main__":
    sys.exit(main())
