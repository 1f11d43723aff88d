"""`outrider explain` on a SQLite store: where an event, a key or a saga is, why, and which command helps."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner

import outrider
from outrider import Delivery, Event, Inbox, Saga
from outrider.app import open_inbox, open_sagas, open_schema, open_store
from outrider.cli import app
from outrider.event import Stream
from outrider.outbox.model import Retry, Settlement, Settlements
from outrider.outbox.store import OutboxStore

ORDERS = "orders"


class Shop:
    """A store with events, and a person who asks about them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.url = f"sqlite:///{self.path}"
        self.broker = f"embedded:///{directory / 'log.db'}"

    def __call__(self, *args: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, list(args), env={"OUTRIDER_STORE": self.url, "OUTRIDER_BROKER": self.broker})
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    def explain(self, what: str) -> Any:
        return json.loads(self("explain", what, "--json").stdout)

    def stage(self, *keys: str, **fields: Any) -> list[str]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as conn:
            conn.execute("BEGIN IMMEDIATE")
            events = [Event("order.placed", {"secret": key}, topic=ORDERS, key=key, **fields) for key in keys]
            ids = outrider.stage_sync(conn, *events)
            conn.execute("COMMIT")
        return [str(event_id) for event_id in ids]

    def with_store(self, work: Callable[[OutboxStore], Awaitable[None]]) -> None:
        async def run() -> None:
            store = await open_store(self.url)
            try:
                await work(store)
            finally:
                await store.close()

        asyncio.run(run())

    def fail_first(self) -> None:
        """Let a relay that stays alive fail in publishing the first event of each stream."""

        async def fail(store: OutboxStore) -> None:
            beat = await store.heartbeat("relay-7", 60.0, first=True)
            assert beat
            lease = await store.claim("relay-7", beat.free_lanes)
            fetched = await store.fetch(lease, dict.fromkeys(lease.epochs, 10))
            event = fetched.events[0]
            stream = Stream(event.lane, event.topic or "", event.key)
            failure = {"kind": "rejected", "error": "the broker said no"}
            await store.settle(lease, Settlements(others=[Settlement(event, stream, Retry(3600.0, failure))]))

        self.with_store(fail)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_") and name != "OUTRIDER_ACTOR"]:
        monkeypatch.delenv(name)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    made = Shop(tmp_path)
    asyncio.run(open_schema(made.url).migrate())
    return made


def commands(found: Any) -> list[str]:
    return [help_["command"] for help_ in found["helps"]]


def test_an_event_that_no_relay_looks_at_says_so_and_names_the_relay(shop: Shop) -> None:
    [event_id] = shop.stage("A")
    found = shop.explain(event_id)
    assert (found["kind"], found["facts"]["event"]["state"]) == ("event", "pending")
    assert found["reasons"] == ["no relay is running"]
    assert commands(found) == ["outrider relay"]
    assert "payload" not in found["facts"]["event"]
    shown = shop("explain", event_id).stdout
    assert f"order.placed {event_id} of A on orders is pending" in shown
    assert "what helps\n  outrider relay" in shown


def test_an_event_that_is_not_due_says_from_when_it_may_go(shop: Shop) -> None:
    [event_id] = shop.stage("A", available_at=datetime.now(UTC) + timedelta(days=1))
    assert shop.explain(event_id)["reasons"][0].startswith("it may not be published before ")


def test_a_delivered_event_needs_nothing(shop: Shop) -> None:
    [event_id] = shop.stage("A")
    shop("relay", "--until-empty")
    found = shop.explain(event_id)
    assert found["reasons"][0].startswith("the broker confirmed it at ")
    assert found["helps"] == []


def test_a_dead_letter_shows_its_reason_and_the_possible_commands(shop: Shop) -> None:
    [event_id] = shop.stage("A")
    shop("dead-letters", "add", event_id, "--reason-text", "looks wrong")
    found = shop.explain(event_id)
    first, second, third = found["reasons"]
    assert first.endswith("after 0 attempts: by_hand")
    assert (second, third) == ("the last failure: looks wrong", "its stream waits until a person decides")
    assert f"outrider dead-letters replay {event_id}" in commands(found)


def test_an_event_behind_a_dead_letter_names_it_and_how_to_decide(shop: Shop) -> None:
    first, second = shop.stage("A", "A")
    shop("dead-letters", "add", first)
    shop("relay", "--until-empty", code=1)
    found = shop.explain(second)
    assert found["facts"]["blocked"]["head"] == first
    assert found["reasons"][:2] == [
        "it waits behind the head of its stream",
        f"the stream is blocked by the dead letter order.placed {first} (by_hand), until a person decides; 1 wait",
    ]
    assert commands(found)[:3] == [f"outrider dead-letters {verb} {first}" for verb in ("replay", "edit", "discard")]


def test_a_failed_event_shows_its_attempts_its_failure_and_the_relay_that_owns_its_lane(shop: Shop) -> None:
    first, second = shop.stage("A", "A")
    shop.fail_first()
    found = shop.explain(first)
    error, attempt, owner = found["reasons"]
    assert error == "the last failure: the broker said no"
    assert attempt.startswith("1 attempt failed, and the next one is due ")
    assert owner.startswith("relay relay-7 owns lane ")
    behind = shop.explain(second)["reasons"]
    assert behind[0] == "it waits behind the head of its stream"
    assert behind[1].startswith(f"the head of the stream, order.placed {first}, is failed after 1 attempt: the broker")


def test_a_key_lists_its_streams_and_what_blocks_them(shop: Shop) -> None:
    first, _ = shop.stage("A", "A")
    shop("dead-letters", "add", first)
    found = shop.explain("A")
    assert (found["kind"], found["summary"]) == ("key", "the key A is blocked")
    assert found["reasons"][0] == "orders: 1 pending, 1 dead_letter"
    assert found["facts"]["streams"][0]["blocked"]["cause"] == "dead_letter"
    assert f"outrider dead-letters replay {first}" in commands(found)
    assert "- no relay is running" in shop("explain", "A").stdout


def test_a_key_without_undelivered_events_is_delivered(shop: Shop) -> None:
    shop.stage("A")
    shop("relay", "--until-empty")
    assert shop.explain("A")["summary"] == "all events of A are delivered"


def test_a_key_shows_a_gap_at_a_consumer(shop: Shop) -> None:
    async def receive() -> None:
        store = await open_inbox(shop.url)
        inbox = Inbox(store)
        inbox.consumer("billing", ordering="strict")
        for number in (1, 3):
            headers = {"message_id": str(UUID(int=number)).encode(), "event_type": b"order.placed"}
            headers |= {"sequence": str(number).encode(), "gapless": b"true"}
            delivery = Delivery(ORDERS, b"B", b"{}", headers)
            await inbox.process(delivery, lambda event, tx: None, consumer="billing")
        await store.close()

    asyncio.run(receive())
    found = shop.explain("B")
    assert found["summary"] == "the key B has no event in the outbox"
    assert "waits for the event after number 1" in found["reasons"][0]
    assert commands(found) == ["outrider inbox skip-gap --consumer billing --topic orders --key B"]


@dataclass
class Order:
    order_id: str


def test_a_saga_is_explained_by_its_id_and_by_its_type_and_correlation_id(shop: Shop) -> None:
    order = Saga("order", Order)
    order.wait("parcel.collected")

    async def start() -> None:
        store = await open_sagas(shop.url)
        async with store.transaction() as tx:
            await order.start(tx, Order("A-1"), correlation_id="A-1")
        await store.close()

    asyncio.run(start())
    saga_id = shop.explain("order/A-1")["saga_id"]
    assert shop.explain(saga_id)["correlation_id"] == "A-1"
    assert shop("explain", saga_id).stdout.startswith("order A-1 is started")


def test_nothing_known_is_a_finding(shop: Shop) -> None:
    assert "is no event, key or saga" in shop("explain", "nobody", code=1).stderr
    assert "is no event, key or saga" in shop("explain", str(UUID(int=7)), code=1).stderr
