"""A relay whose outcomes cannot be written, on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

import outrider
from outrider import Event, Relay, RelaySettings
from outrider.stores.postgres import PostgresStore
from outrider.telemetry.events import SettleFailed, SettleRecovered
from outrider.testing import MemoryBroker
from tests.support.running_relay import SignallingObserver

pytestmark = pytest.mark.postgres

EVENTS, FAILURES = 1000, 6
BROKEN = "the archive is broken"
BREAK = f"""
CREATE FUNCTION outrider.break_archive() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN IF new.key LIKE 'bad%' THEN RAISE EXCEPTION '{BROKEN}'; END IF; RETURN new; END $$;
CREATE TRIGGER break_archive BEFORE INSERT ON outrider.outbox_archive FOR EACH ROW
EXECUTE FUNCTION outrider.break_archive();
"""
MEND = "DROP FUNCTION outrider.break_archive CASCADE"


async def test_a_settle_that_fails_is_repeated_alone_and_its_events_are_published_once(
    store: PostgresStore, conn: Any
) -> None:
    observer, broker = SignallingObserver(), MemoryBroker(ordered=True)
    relay = Relay(store, broker, RelaySettings(poll_seconds_max=0.1, workers=2), observer=observer)
    await conn.execute(BREAK)
    await _stage(conn, "bad")
    running = asyncio.create_task(relay.run())

    async def failed_often() -> bool:
        return len(observer.of(SettleFailed)) >= FAILURES

    async def archived() -> bool:
        return bool(await conn.fetchval("SELECT count(*) FROM outrider.outbox_archive") == EVENTS)

    try:
        await observer.until(failed_often)
        published_while_broken = len(broker.log)
        await conn.execute(MEND)
        await observer.until(archived)
    finally:
        relay.stop()
        await running
    print(f"{EVENTS} events: {published_while_broken} published while broken, {len(broker.log)} in all")
    assert published_while_broken <= EVENTS
    assert set(Counter(message.message_id for message in broker.log).values()) == {1}
    assert len(broker.log) == EVENTS
    assert BROKEN in observer.of(SettleFailed)[0].error
    assert observer.of(SettleRecovered)
    assert await conn.fetchval("SELECT count(*) FROM outrider.outbox") == 0


async def test_lanes_that_can_be_settled_go_on_beside_a_lane_that_cannot(store: PostgresStore, conn: Any) -> None:
    observer, broker = SignallingObserver(), MemoryBroker(ordered=True)
    relay = Relay(store, broker, RelaySettings(poll_seconds_max=0.1, workers=1), observer=observer)
    await conn.execute(BREAK)
    async with conn.transaction():
        await outrider.stage(conn, Event("order.placed", {}, topic="orders", key="bad"))
    await _stage(conn, "good")
    bad_lane = await conn.fetchval("SELECT lane FROM outrider.outbox WHERE key = 'bad'")
    good = await conn.fetchval("SELECT count(*) FROM outrider.outbox WHERE lane <> $1", bad_lane)
    running = asyncio.create_task(relay.run())

    async def archived() -> bool:
        return bool(await conn.fetchval("SELECT count(*) FROM outrider.outbox_archive") == good)

    async def held() -> bool:
        return any(fact.lanes == (bad_lane,) for fact in observer.of(SettleFailed))

    try:
        await observer.until(archived)
        await observer.until(held)
    finally:
        relay.stop()
        await running
    assert max(Counter(message.message_id for message in broker.log).values()) == 1


async def _stage(conn: Any, prefix: str) -> None:
    async with conn.transaction():
        await outrider.stage(
            conn, *(Event("order.placed", {"n": n}, topic="orders", key=f"{prefix}{n % 50}") for n in range(EVENTS))
        )
