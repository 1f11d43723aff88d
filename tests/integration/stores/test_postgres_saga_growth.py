"""Sagas on PostgreSQL whose tables have filled since the server cached the plans of all statements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from outrider.drivers import asyncpg as driver
from outrider.saga import Saga
from outrider.saga.model import Phase
from outrider.stores.postgres import PostgresSagas
from outrider.testing.saga_harness import SagaHarness, claim_of, new_saga
from tests.support.postgres_growth import WARM_UP, rows_read

pytestmark = pytest.mark.postgres

TABLES = ("saga_instance", "saga_step", "saga_mailbox", "saga_barrier", "outbox", "outbox_dead_letter")
ANALYZE = "VACUUM (ANALYZE) " + ", ".join(f"outrider.{table}" for table in TABLES)
FILLED, ROUNDS = 6_000, 40
FILL = """
INSERT INTO outrider.saga_instance (saga_id, saga_type, definition_version, correlation_id, state, status, started_at,
    updated_at, ended_at)
SELECT md5('filled' || i)::uuid, 'order', 1, 'F-' || i, '{}', 'completed', now(), now(), now()
FROM generate_series(1, 6000) AS i;
INSERT INTO outrider.saga_step (saga_id, step, phase, status, position, attempts)
SELECT md5('filled' || i)::uuid, 'reserve', 'action', 'done', 1, 1 FROM generate_series(1, 6000) AS i;
INSERT INTO outrider.saga_mailbox (saga_id, event_id, kind, name, body, delivered_at, seen, saga_type,
    definition_version)
SELECT md5('filled' || i)::uuid, gen_random_uuid(), 'reply', 'stock.reserved', '{}', now(), true, 'order', 1
FROM generate_series(1, 6000) AS i;
INSERT INTO outrider.saga_barrier
SELECT 'stock', 'f' || i, 'action', false, '{}', now() FROM generate_series(1, 6000) AS i;
INSERT INTO outrider.outbox (event_type, aggregate_id, topic, payload)
SELECT 'order.placed', 'k' || i, 'orders', '{}' FROM generate_series(1, 6000) AS i;
INSERT INTO outrider.outbox_dead_letter (id, event_id, event_type, payload, headers, topic, key, priority,
    schema_version, created_at, lane, attempts, reason, policy, dead_lettered_at)
SELECT i, gen_random_uuid(), 'order.placed', '{}', '{}', 'orders', 'k' || i, 0, 1, now(), 1, 1, 'poison_message',
    'skip', now()
FROM generate_series(1, 6000) AS i;
"""


LEASE_SECONDS = 3600.0
"""Longer than the test takes on any machine, because a claim that has ended would be found again."""


@dataclass
class Order:
    """The state of the sagas of this test."""

    amount: int = 12


def order_saga() -> Saga[Order]:
    """A command with a reply and a local step, which fails for some orders so that both are compensated."""
    order = Saga("order", Order)
    order.request(
        "stock.reserve", topic="stock", reply="reserved", compensate="stock.free", compensated="freed", name="reserve"
    )

    @order.local()
    async def charge(run: Any, tx: Any) -> None:
        await tx.execute("SELECT 1")

    return order


async def _use(harness: SagaHarness, store: PostgresSagas, number: int) -> None:
    """Run a saga to its end, use a claim by hand, and execute a command at a participant."""
    name = f"A-{number}"
    [saga] = harness.sagas
    await harness.start(saga, Order(), name)
    await harness.reply("reserve", correlation_id=name)
    assert (await harness.saga(name)).status == "completed"
    async with store.transaction() as tx:
        await store.start(tx, new_saga(name, "refund"))
    [record] = await store.claim("ann", [("refund", 1)], limit=10, lease_seconds=LEASE_SECONDS)
    claim = claim_of(record)
    assert await store.renew([claim], LEASE_SECONDS) == {claim.saga_id}
    async with store.transaction() as tx:
        assert await store.undelivered(tx, [uuid4(), uuid4()]) == {}
        for verb, args in (
            ("participant_enter", ("stock", name, Phase.ACTION)),
            ("participant_save_reply", ("stock", name, Phase.ACTION, b"{}")),
            ("participant_enter", ("stock", name, Phase.ACTION)),
        ):
            await driver.run(tx.connection, verb, args, "outrider")


async def test_a_worker_reads_only_its_own_rows_after_the_tables_have_filled(postgres_url: str, conn: Any) -> None:
    store = await PostgresSagas.open(postgres_url, connections_max=3)
    harness = SagaHarness(order_saga(), store)
    await conn.execute(ANALYZE)
    for number in range(WARM_UP):
        await _use(harness, store, number)
    await conn.execute("DELETE FROM outrider.outbox; DELETE FROM outrider.saga_mailbox")
    await conn.execute(ANALYZE)
    await _use(harness, store, WARM_UP)
    await conn.execute(FILL)
    await conn.execute("SELECT pg_stat_reset()")
    for number in range(ROUNDS):
        await _use(harness, store, 1000 + number)
    await store.close()
    read = await rows_read(conn, *TABLES)
    assert max(read.values()) < FILLED, dict(sorted(read.items()))
