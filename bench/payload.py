"""What the checks of payloads cost a relay: its own time per event, with a backlog to nowhere."""

from __future__ import annotations

import asyncio
import statistics
import time

from bench import backlog
from bench.load import Tally
from bench.staging import Cost
from outrider import Relay
from outrider.brokers.null import NullBroker
from outrider.payload import Payloads, Rule, required_fields
from outrider.stores.postgres import PostgresStore

KEYS = 5_000
SCHEMA = {
    "type": "object",
    "required": ["order", "pad"],
    "additionalProperties": False,
    "properties": {"order": {"type": "integer", "minimum": 1}, "pad": {"type": "string", "maxLength": 1000}},
}
KINDS: dict[str, Payloads | None] = {
    "a plain relay": None,
    "with payloads, and no schema of the type": Payloads({"other": {1: SCHEMA}}),
    "with a schema": Payloads({"order.placed": {1: SCHEMA}}),
    "with a schema and two rules": Payloads(
        {"order.placed": {1: SCHEMA}},
        rules=[
            required_fields("order.*", "order"),
            Rule("a number", "order.placed", lambda _, payload: payload["order"] > 0),
        ],
    ),
}


async def run(url: str, events: int, rounds: int) -> list[Cost]:
    """Measure every kind in turns, so that all see the same machine; the median of the rounds counts."""
    await backlog.prepare(url, events)
    spent: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(rounds):
        for name, payloads in KINDS.items():
            spent[name].append(await _drain(url, events, payloads))
    return [Cost(name, statistics.median(each)) for name, each in spent.items()]


async def _drain(url: str, events: int, payloads: Payloads | None) -> float:
    """Drain a backlog; return the time of this process per event, in microseconds."""
    await backlog.fill(url, events, KEYS)
    store = await PostgresStore.open(url)
    tally = Tally(events)
    relay = Relay(store, NullBroker(), observer=tally, payloads=payloads)
    started = time.process_time()
    running = asyncio.create_task(relay.run())
    await tally.reached.wait()
    seconds = time.process_time() - started
    relay.stop()
    await running
    await store.close()
    return seconds / events * 1e6
