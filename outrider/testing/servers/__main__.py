"""Start throw-away servers, print their URLs, and stop them on Ctrl-C: `make services ARGS="postgres kafka"`."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack

from outrider.testing.servers.kafka import KafkaServer
from outrider.testing.servers.postgres import PostgresServer
from outrider.testing.servers.rabbitmq import RabbitServer


def _postgres(stack: ExitStack, fsync: bool) -> str:
    return stack.enter_context(PostgresServer(fsync=fsync)).url


def _kafka(stack: ExitStack, fsync: bool) -> str:
    return f"kafka://{stack.enter_context(KafkaServer()).bootstrap}"


def _rabbitmq(stack: ExitStack, fsync: bool) -> str:
    return stack.enter_context(RabbitServer()).url


KINDS: dict[str, Callable[[ExitStack, bool], str]] = {"postgres": _postgres, "kafka": _kafka, "rabbitmq": _rabbitmq}


def main() -> None:
    """Run until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m outrider.testing.servers", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"which: {', '.join(KINDS)} (default: postgres)")
    parser.add_argument("--json", action="store_true", help="print the URLs as one JSON object")
    parser.add_argument("--fsync", action="store_true", help="write to disk for real, as benchmarks need")
    options = parser.parse_args()
    if unknown := set(options.kinds) - KINDS.keys():
        parser.error(f"no such server: {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with ExitStack() as stack:
        urls = {kind: KINDS[kind](stack, options.fsync) for kind in options.kinds or ["postgres"]}
        print(json.dumps(urls) if options.json else "\n".join(f"{k}: {v}" for k, v in urls.items()), flush=True)
        stopped.wait()


if __name__ == "__main__":
    main()
