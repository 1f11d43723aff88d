"""Start throw-away servers, print their URLs, and stop them on Ctrl-C: `make services`."""

from __future__ import annotations

import argparse
import json
import signal
import threading

from outrider.testing.servers.postgres import PostgresServer


def main() -> None:
    """Run until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m outrider.testing.servers", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the URLs as one JSON object")
    parser.add_argument("--fsync", action="store_true", help="write to disk for real, as benchmarks need")
    options = parser.parse_args()

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with PostgresServer(fsync=options.fsync) as server:
        urls = {"OUTRIDER_STORE": server.url}
        print(json.dumps(urls) if options.json else "\n".join(f"{k}={v}" for k, v in urls.items()), flush=True)
        stopped.wait()


if __name__ == "__main__":
    main()
