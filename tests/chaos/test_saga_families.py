"""Workers of parents and children that are killed again and again: a family is done, or undone, as a whole."""

from __future__ import annotations

import random
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support import family_worker
from tests.support.family_worker import DECLINED, FINE, LOST, STEPS, Trip, trip_saga, work
from tests.support.relay_process import until
from tests.support.saga_ledger import TABLES
from tests.support.saga_worker_process import FORKING, end
from tests.support.sizes import sized

pytestmark = [pytest.mark.postgres, pytest.mark.chaos, pytest.mark.timeout(300)]

TRIPS = {kind: sized(20, 4) for kind in (FINE, DECLINED, LOST)}
WORKERS = 2
KILLS = sized(20, 4)
EXPECTED = {FINE: "completed", DECLINED: "compensated", LOST: "compensated"}
LINES = "SELECT count(*) >= $1 FROM ledger"
OPEN = "SELECT count(*) FROM outrider.saga_instance WHERE ended_at IS NULL"
SAGAS = "SELECT saga_id::text, parent_id::text, saga_type, correlation_id, status, owner FROM outrider.saga_instance"
LOST_STEPS = "SELECT count(*) FROM outrider.saga_audit_log WHERE detail LIKE '%the worker was lost%'"


@contextmanager
def working(url: str, folder: Path) -> Iterator[BaseProcess]:
    """Run a worker around the block; if it is left at the end, kill it."""
    FORKING.set_forkserver_preload([family_worker.__name__])
    worker = FORKING.Process(target=work, args=(url, folder), daemon=True)
    worker.start()
    try:
        yield worker
    except BaseException:
        print((folder / "workers.log").read_text()[-10_000:])
        raise
    finally:
        worker.kill()
        worker.join()


async def test_killed_workers_leave_no_family_half_done_and_repeat_no_effect(
    conn: Any, postgres_url: str, tmp_path: Path
) -> None:
    rng, trip = random.Random(3), next(saga for saga in trip_saga(None) if saga.saga_type == "trip")
    names = [f"{kind}-{number:02}" for kind, count in TRIPS.items() for number in range(count)]
    await conn.execute(TABLES)
    async with conn.transaction():
        for name in rng.sample(names, len(names)):
            await trip.start(conn, Trip(name), correlation_id=name)
    with ExitStack() as stack:
        workers = [stack.enter_context(working(postgres_url, tmp_path)) for _ in range(WORKERS)]
        for turn in range(KILLS):
            await until("more effects", conn, LINES, (turn + 1) * len(names) * len(STEPS) // (KILLS + 2))
            victim = workers.pop(rng.randrange(WORKERS))
            victim.kill()
            assert await end(victim) == -signal.SIGKILL
            assert await conn.fetchval(OPEN), "it was to be killed in the middle of its work"
            workers.append(stack.enter_context(working(postgres_url, tmp_path)))
        await until("the end of all trips", conn, f"SELECT ({OPEN}) = 0")
        for worker in workers:
            worker.terminate()
        assert [await end(worker) for worker in workers] == [0] * WORKERS
    await _check_whole_or_undone(conn, set(names))


async def _check_whole_or_undone(conn: Any, names: set[str]) -> None:
    sagas = {row["saga_id"]: row for row in await conn.fetch(SAGAS)}
    trips = {row["correlation_id"]: row for row in sagas.values() if row["parent_id"] is None}
    assert trips.keys() == names

    def trip_of(saga_id: str) -> str:
        row = sagas[saga_id]
        return trip_of(row["parent_id"]) if row["parent_id"] else str(row["correlation_id"])

    families = Counter(trip_of(saga_id) for saga_id in sagas)
    effects: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for key, amount in await conn.fetch("SELECT order_id, amount FROM ledger ORDER BY id"):
        effects[trip_of(key.partition(":")[0])][key].append(amount)
    for saga_id, row in sagas.items():
        expected = EXPECTED[trip_of(saga_id).partition("-")[0]]
        assert (row["status"], row["owner"]) == (expected, None), f"{row['saga_type']} of {trip_of(saga_id)}"
    for name in names:
        kind = name.partition("-")[0]
        assert families[name] == 4
        once = [1] if kind == FINE else [1, -1]
        assert all(amounts == once for amounts in effects[name].values()), f"{name}: {dict(effects[name])}"
        written = sorted(key.rpartition(":")[2] for key in effects[name])
        assert written == sorted(STEPS) if kind != LOST else set(written) <= set(STEPS), name
    assert await conn.fetchval(LOST_STEPS) > 0, "no worker was killed in a step"
