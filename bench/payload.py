"""What the checks of payloads cost a relay: its own time per event, with a backlog to nowhere.

And what encrypted fields cost the process that stages or handles an event.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping

from bench import backlog
from bench.load import Tally
from bench.staging import Cost
from outrider import Event, Relay
from outrider.brokers.null import NullBroker
from outrider.event import uuid7
from outrider.outbox.validation import StagingRules, validate_events
from outrider.payload import Payloads, Rule, required_fields
from outrider.privacy import DataKey, FieldEncryption, KeyRing
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


PERSON = {"order": 1, "pad": "x" * 400, "customer": {"email": "ann@example.com", "name": "Ann Canary"}}
VARIABLE = "BENCH_KEYS"


def fields(events: int, rounds: int) -> list[Cost]:
    """Measure the preparation of an event with two sensitive fields, plain and encrypted, and its opening."""
    os.environ[VARIABLE] = DataKey.new().text
    sensitive = {"order.placed": ["customer.email", "customer.name"]}
    payloads = Payloads(encryption=FieldEncryption(keys=KeyRing.from_environment(VARIABLE), sensitive=sensitive))
    event = Event("order.placed", PERSON, event_id=uuid7(), aggregate_id="k1")
    plain, encrypting = StagingRules(), StagingRules(payloads=payloads)
    stored = json.loads(validate_events([event], encrypting).plain[0].payload)
    received = Event("order.placed", stored, event_id=event.event_id)
    kinds: Mapping[str, Callable[[], object]] = {
        "prepared as it is": lambda: validate_events([event], plain),
        "encrypting two fields": lambda: validate_events([event], encrypting),
        "opened as it is": lambda: payloads.open(event),
        "decrypting two fields": lambda: payloads.open(received),
    }
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, work in kinds.items():
            started = time.process_time()
            for _ in range(events):
                work()
            spent[name].append((time.process_time() - started) / events * 1e6)
    return [Cost(name, statistics.median(each)) for name, each in spent.items()]
