"""Start throw-away servers, print their URLs, and stop them on Ctrl-C: `make services ARGS="postgres kafka"`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from outrider.testing.servers import kafka, mongo
from outrider.testing.servers.kafka import KafkaServer
from outrider.testing.servers.mongo import MongoServer
from outrider.testing.servers.postgres import PgBouncer, PostgresServer
from outrider.testing.servers.rabbitmq import RabbitServer
from outrider.testing.servers.server import Server, ServerError, ServerMissing

S = TypeVar("S", bound=Server)

KINDS: dict[str, Callable[[], Server]] = {
    "kafka": KafkaServer,
    "rabbitmq": RabbitServer,
    "mongo": MongoServer,
}
NAMES = ("postgres", "pgbouncer", *KINDS)
NO_FSYNC = "PostgreSQL runs with fsync off, so `outrider doctor` refuses it; with --fsync it does not."


def main() -> None:
    """Parse the arguments and run the command."""
    parser = argparse.ArgumentParser(prog="python -m outrider.testing.servers", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"which: {', '.join(NAMES)}, or all (default: postgres)")
    parser.add_argument("--json", action="store_true", help="print the URLs as one JSON object")
    parser.add_argument("--fsync", action="store_true", help="PostgreSQL writes to disk for real, as benchmarks need")
    parser.add_argument("--fetch", action="store_true", help="only fetch what no package of the system brings, and end")
    options = parser.parse_args()
    wanted = NAMES if "all" in options.kinds else options.kinds or ["postgres"]
    if unknown := set(wanted) - set(NAMES):
        parser.error(f"no such server: {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}, all")
    if options.fetch:
        fetch()
        return
    try:
        serve(wanted, options.fsync, options.json)
    except ServerError as error:
        sys.exit(str(error))


def fetch() -> None:
    """Fill the cache before the tests run. Servers that cannot be fetched are reported; their tests are skipped."""
    for find in (kafka.find_programs, mongo.find_program):
        try:
            find()
        except ServerMissing as error:
            tell(str(error))


def serve(wanted: Sequence[str], fsync: bool, as_json: bool) -> None:
    """Start servers, print their URLs, and wait for a signal."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with ExitStack() as stack:
        urls = start(wanted, stack, fsync)
        print(json.dumps(urls) if as_json else "\n".join(f"{k}: {v}" for k, v in urls.items()), flush=True)
        stopped.wait()


def start(wanted: Sequence[str], stack: ExitStack, fsync: bool) -> dict[str, str]:
    """Start each kind once; a pooler also starts the server behind it."""
    urls = {}
    if "postgres" in wanted or "pgbouncer" in wanted:
        postgres = _started(PostgresServer(fsync=fsync), stack)
        urls["postgres"] = postgres.url
        if not fsync:
            tell(NO_FSYNC)
        if "pgbouncer" in wanted:
            urls["pgbouncer"] = _started(PgBouncer(postgres), stack).url
    for kind, server in KINDS.items():
        if kind in wanted:
            urls[kind] = _started(server(), stack).url
    return urls


def _started(server: S, stack: ExitStack) -> S:
    tell(f"Starting {server.name} ...")
    stack.enter_context(server)
    return server


def tell(text: str) -> None:
    """Print progress to standard error: standard output is for the URLs."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
