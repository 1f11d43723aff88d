"""The fence on PostgreSQL where it is hardest: statements that were already waiting when the lane changed hands."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

import outrider
from outrider.brokers.base import CONFIRMED, Nacked
from outrider.errors import Transient
from outrider.event import DeadLetterReason
from outrider.outbox.model import (
    PARK,
    DeadLettered,
    Defer,
    Lease,
    OptimisticClaim,
    Outcome,
    Retention,
    Retry,
    Settlement,
    Settlements,
)
from outrider.outbox.optimistic import OptimisticWriter
from outrider.outbox.validation import StagingRules, validate_events
from outrider.stores.postgres import PostgresStore
from outrider.stores.postgres.database import PostgresDatabase
from outrider.testing import MemoryBroker
from outrider.testing.harness import numbers, order, orders

pytestmark = pytest.mark.postgres

LIMITS = ["statement_timeout", "idle_in_transaction_session_timeout", "tcp_user_timeout"]
FAILURE = {"kind": "nacked", "error": "no"}
OUTCOMES: list[Outcome] = [
    CONFIRMED,
    Retry(1, FAILURE),
    Defer(1),
    PARK,
    DeadLettered(DeadLetterReason.PERMANENT_FAILURE, FAILURE),
]


async def _waiting(conn: Any, count: int = 1) -> None:
    """Return once that many backends wait for a lock."""
    sql = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'outrider' "
        "AND datname = current_database()"
    )
    async with asyncio.timeout(20):
        while await conn.fetchval(sql) < count:
            await conn.execute("SELECT pg_stat_clear_snapshot()")


async def _fetched(store: PostgresStore, owner: str) -> tuple[Lease, list[Settlement]]:
    await store.heartbeat(owner, 60, first=True)
    lease = await store.claim(owner, range(store.lanes * 3))
    fetched = await store.fetch(lease, dict.fromkeys(lease.epochs, 10))
    return lease, [Settlement(e, e.stream, CONFIRMED) for e in fetched.events]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_settle_that_was_waiting_during_a_takeover_changes_nothing(
    store: PostgresStore, conn: Any, postgres_url: str, outcome: Outcome
) -> None:
    async with conn.transaction():
        await outrider.stage(conn, *orders(3))
    lease, settlements = await _fetched(store, "old")
    heir = await asyncpg.connect(postgres_url)
    takeover = heir.transaction()
    await takeover.start()
    # The heir has taken every lane, but not yet committed: the old owner's settle has to wait for it.
    await heir.execute("UPDATE outrider.outbox_lane SET owner = 'new', epoch = epoch + 1")
    late = asyncio.create_task(store.settle(lease, Settlements.of([s._replace(outcome=outcome) for s in settlements])))
    await _waiting(conn)
    await takeover.commit()
    assert await late == 0
    assert await store.admin.counts() == {"pending": 3, "sent": 0, "dead_letter": 0}
    assert await store.admin.blocked_streams(10) == []
    await heir.close()


async def test_a_fetch_waits_for_no_takeover_and_reads_nothing_after_it(
    store: PostgresStore, conn: Any, postgres_url: str
) -> None:
    async with conn.transaction():
        await outrider.stage(conn, *orders(3))
    lease, _ = await _fetched(store, "old")
    heir = await asyncpg.connect(postgres_url)
    takeover = heir.transaction()
    await takeover.start()
    await heir.execute("UPDATE outrider.outbox_lane SET owner = 'new', epoch = epoch + 1")
    quotas = dict.fromkeys(lease.epochs, 10)
    async with asyncio.timeout(20):
        before = await store.fetch(lease, quotas)
    await takeover.commit()
    after = await store.fetch(lease, quotas)
    assert [len(before.events), len(after.events)] == [3, 0]
    assert after.lanes == frozenset()
    await heir.close()


@pytest.mark.parametrize("verb", ["fetch", "due", "next_due"])
async def test_a_look_at_rest_writes_no_wal(store: PostgresStore, conn: Any, verb: str) -> None:
    await store.heartbeat("relay", 60, first=True)
    lease = await store.claim("relay", range(store.lanes * 3))
    # The claim has left dead versions of lanes behind, which the first reader may tidy up.
    await conn.execute("VACUUM outrider.outbox_lane")
    lanes, epochs = list(lease.epochs), list(lease.epochs.values())
    args: dict[str, tuple[Any, ...]] = {
        "fetch": ("relay", lanes, epochs, [10] * len(lanes)),
        "due": ("relay", lanes, epochs, 10),
        "next_due": (lanes,),
    }
    async with conn.transaction():
        plan = json.loads(await conn.fetchval(f"EXPLAIN (ANALYZE, WAL, FORMAT JSON) {store.sql[verb]}", *args[verb]))
        assert plan[0]["Plan"]["WAL Records"] == 0
        assert await conn.fetchval("SELECT pg_current_xact_id_if_assigned()") is None


async def test_a_settle_waiting_on_an_event_row_still_holds_its_lane(
    store: PostgresStore, conn: Any, postgres_url: str
) -> None:
    """While a settle waits for a row, its lane cannot be claimed; when it ends, the claim finds a settled event."""
    async with conn.transaction():
        await outrider.stage(conn, order(1))
    lease, settlements = await _fetched(store, "old")
    blocker = await asyncpg.connect(postgres_url)
    blocking = blocker.transaction()
    await blocking.start()
    await blocker.execute("SELECT 1 FROM outrider.outbox FOR UPDATE")
    settling = asyncio.create_task(store.settle(lease, Settlements.of(settlements)))
    await _waiting(conn)
    await conn.execute("UPDATE outrider.outbox_relay SET alive_until = clock_timestamp() - interval '1 second'")
    await store.heartbeat("new", 60, first=True)
    lane = settlements[0].stream.lane
    assert lane not in (await store.claim("new", range(store.lanes * 3))).epochs
    await blocking.commit()
    assert await settling == 1
    assert lane in (await store.claim("new", [lane])).epochs
    await blocker.close()


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "as behind a pooler"])
async def test_a_client_that_stands_still_in_a_transaction_does_not_keep_its_lanes_locked(
    store: PostgresStore, conn: Any, postgres_url: str, pooled: bool
) -> None:
    await store.heartbeat("old", 60, first=True)
    lease = await store.claim("old", range(store.lanes * 3))
    database = PostgresDatabase(postgres_url, pooled=pooled)
    await database.open()

    async def stall() -> None:
        async with database.transaction() as stalled:
            await stalled.fetch(store.sql["lock_lanes"], "old", list(lease.epochs), list(lease.epochs.values()))
            await conn.execute("UPDATE outrider.outbox_relay SET alive_until = clock_timestamp() - interval '1 second'")
            await store.heartbeat("new", 60, first=True)
            async with asyncio.timeout(20):
                while len((await store.claim("new", range(store.lanes * 3))).epochs) == 0:
                    await conn.execute("SELECT pg_sleep(0.1)")
            await stalled.fetch("SELECT 1")

    with pytest.raises(Transient):
        await stall()
    await database.close()


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "as behind a pooler"])
async def test_statements_of_the_store_have_a_limit_on_the_server(postgres_url: str, pooled: bool) -> None:
    """A frozen client cannot cancel a statement that waits for a row while it holds lanes."""
    database = PostgresDatabase(postgres_url, pooled=pooled)
    await database.open()
    async with database.statement() as conn:
        assert await conn.fetchval("SHOW statement_timeout") == "1min"
    async with database.transaction() as conn:
        limits = [await conn.fetchval(f"SHOW {name}") for name in LIMITS]
        assert limits == ["1min", "5s", "5000"]
    await database.close()


TICKING_CLOCK = """
CREATE SEQUENCE outrider.test_tick;
CREATE OR REPLACE FUNCTION outrider.outbox_clock() RETURNS timestamptz LANGUAGE sql VOLATILE
RETURN timestamptz '2030-01-01 00:00:00+00' + nextval('outrider.test_tick') * interval '1 second';
"""


async def test_a_claim_that_ends_while_it_is_renewed_is_renewed_whole_or_not_at_all(
    store: PostgresStore, conn: Any
) -> None:
    await conn.execute(TICKING_CLOCK)
    claim = OptimisticClaim("writer", 1000)
    request = validate_events(orders(20), StagingRules())
    async with conn.transaction():
        staged = await outrider.Outbox().insert(conn, request, claim)
    ids = [row.event_id for row in staged if row.optimistic]
    renewed = set()
    for tick in range(950, 1100, 3):
        attempt = conn.transaction()
        await attempt.start()
        await conn.execute("SELECT setval('outrider.test_tick', $1)", tick)
        renewed.add(len(await conn.fetch(store.sql["renew_claim"], claim.owner, ids, claim.seconds)))
        await attempt.rollback()
    assert renewed == {0, 20}


async def test_staging_a_known_id_while_the_relay_archives_it_is_a_no_op(
    store: PostgresStore, conn: Any, postgres_url: str
) -> None:
    known = uuid4()
    async with conn.transaction():
        await outrider.stage(conn, order(1, event_id=known))
    archiver = await asyncpg.connect(postgres_url)
    archiving = archiver.transaction()
    await archiving.start()
    lease, settlements = await _fetched(store, "relay")
    parameters = [settlement.event.event_id for settlement in settlements]
    await archiver.execute(
        store.sql["confirm_archive"], "relay", list(lease.epochs), list(lease.epochs.values()), parameters, [], []
    )

    async def stage_again() -> None:
        writer = await asyncpg.connect(postgres_url, server_settings={"application_name": "outrider"})
        async with writer.transaction():
            await outrider.stage(writer, order(1, event_id=known))
        await writer.close()

    again = asyncio.create_task(stage_again())
    await _waiting(conn)
    await archiving.commit()
    await again
    assert await store.admin.counts() == {"sent": 1, "dead_letter": 0}
    await archiver.close()


async def test_the_same_id_in_two_streams_at_once_is_rejected_as_transient(conn: Any, postgres_url: str) -> None:
    known = uuid4()
    other = await asyncpg.connect(postgres_url)
    first = other.transaction()
    await first.start()
    await outrider.stage(other, order(1, "A", event_id=known, sequence="auto"))

    async def second() -> None:
        writer = await asyncpg.connect(postgres_url, server_settings={"application_name": "outrider"})
        try:
            async with writer.transaction():
                await outrider.stage(writer, order(1, "B", event_id=known, sequence="auto"))
        finally:
            await writer.close()

    racing = asyncio.create_task(second())
    await _waiting(conn)
    await first.commit()
    with pytest.raises(Transient, match="id of its own"):
        await racing
    await other.close()


async def test_an_optimistic_probe_waits_for_the_streams_lock_before_it_looks(
    store: PostgresStore, conn: Any, postgres_url: str
) -> None:
    """A writer that had to wait for its stream must not hold its event: the one before it is not delivered yet."""
    broker = MemoryBroker()
    first = conn.transaction()
    await first.start()
    await outrider.stage(conn, order(1, sequence="auto"))
    writer = OptimisticWriter(store, broker, outrider.Outbox().insert)

    async def second() -> None:
        own = await asyncpg.connect(postgres_url, server_settings={"application_name": "outrider"})
        async with writer.transaction(own.transaction()) as batch:
            await batch.stage(own, order(2, sequence="auto"))
        await own.close()

    racing = asyncio.create_task(second())
    watcher = await asyncpg.connect(postgres_url)
    await _waiting(watcher)
    await first.commit()
    await racing
    await writer.close()
    assert broker.log == []
    assert await store.admin.counts() == {"pending": 2, "sent": 0, "dead_letter": 0}
    relay = outrider.Relay(store, broker)
    await relay.heartbeat()
    for worker in range(relay.settings.workers):
        await relay.run_once(worker)
    assert numbers(broker.log) == [1, 2]
    await watcher.close()


async def test_two_replays_of_one_blocked_stream_at_once_unblock_it(
    store: PostgresStore, conn: Any, postgres_url: str
) -> None:
    async with conn.transaction():
        ids = await outrider.stage(conn, *orders(5))
    for event_id in (ids[0], ids[2]):
        assert await store.admin.dead_letter(event_id, "me", {"error": "no"}, "block")
    other = await PostgresStore.open(postgres_url)
    first = await asyncpg.connect(postgres_url)
    deciding = first.transaction()
    await deciding.start()
    # One person's transaction has locked the stream; the other's has to wait for it, and then sees what it did.
    await first.execute(store.sql["lock_streams"], [ids[0]])
    second = asyncio.create_task(other.admin.replay([ids[2]], "she"))
    await _waiting(conn)
    resumed = await first.fetch(store.sql["resume"], [ids[0]])
    streams = [(row["lane"], row["topic"], row["stream_key"]) for row in resumed]
    await first.execute(store.sql["drain_held"], *(list(column) for column in zip(*streams, strict=True)))
    await deciding.commit()
    assert await second == 1
    broker = MemoryBroker()
    await _drain(store, broker)
    assert numbers(broker.log) == [1, 2, 3, 4, 5]
    await first.close()
    await other.close()


async def test_a_writer_at_a_stricter_isolation_level_leaves_its_event_to_the_relay(
    store: PostgresStore, conn: Any, postgres_url: str
) -> None:
    """Its statements read an old snapshot, which may lack the delivery of an earlier event."""
    broker = MemoryBroker()
    writer = OptimisticWriter(store, broker, outrider.Outbox().insert)
    await conn.execute("CREATE TABLE aggregate (id text PRIMARY KEY); INSERT INTO aggregate VALUES ('A')")
    late = await asyncpg.connect(postgres_url)
    async with writer.transaction(late.transaction(isolation="repeatable_read")) as batch:
        await late.fetchval("SELECT count(*) FROM aggregate")
        async with conn.transaction():
            await conn.execute("SELECT FROM aggregate FOR UPDATE")
            await outrider.stage(conn, order(1))
        await late.execute("SELECT FROM aggregate FOR UPDATE")
        await batch.stage(late, order(2))
    await writer.close()
    await _drain(store, broker)
    assert numbers(broker.log) == [1, 2]
    await late.close()


async def test_a_brokers_words_cannot_make_a_row_unreadable(store: PostgresStore, conn: Any) -> None:
    async with conn.transaction():
        await outrider.stage(conn, order(1))
    broker = MemoryBroker(script=lambda _: Nacked("bad byte \0 and \ud800 " + "x" * 10_000))
    await _drain(store, broker)
    broker.script = lambda _: CONFIRMED
    await conn.execute("UPDATE outrider.outbox_blocked SET until = clock_timestamp()")
    await _drain(store, broker)
    assert numbers(broker.log) == [1]


async def test_a_waiting_event_without_a_blocked_stream_is_found_by_maintenance(
    store: PostgresStore, conn: Any
) -> None:
    async with conn.transaction():
        await outrider.stage(conn, *orders(2))
    await conn.execute("UPDATE outrider.outbox SET state = 'parked'")
    broker = MemoryBroker()
    await _drain(store, broker)
    assert broker.log == []
    await store.maintenance.prune(Retention())
    await _drain(store, broker)
    assert numbers(broker.log) == [1, 2]


async def _drain(store: PostgresStore, broker: MemoryBroker) -> None:
    relay = outrider.Relay(store, broker)
    await relay.heartbeat()
    while sum([await relay.run_once(worker) for worker in range(relay.settings.workers)]):
        pass
    await store.leave(relay.name)
