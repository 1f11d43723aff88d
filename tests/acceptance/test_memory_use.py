"""A relay's memory does not depend on the backlog."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import asyncpg
import pytest

from tests.support.sizes import sized

pytestmark = pytest.mark.postgres

EVENTS = sized(1_000_000, 100_000)
MEGABYTES_MAX = 150
FILL = """
INSERT INTO outrider.outbox (event_type, aggregate_id, topic, payload)
SELECT 'order.placed', 'k' || i % 5000, 'orders', json_build_object('order', i, 'pad', repeat('x', 200))
FROM generate_series(1, $1::integer) AS i
"""


@pytest.mark.timeout(300)
async def test_a_relay_stays_under_150_mb_while_it_drains_a_large_backlog(postgres_url: str) -> None:
    conn = await asyncpg.connect(postgres_url)
    await conn.execute(FILL, EVENTS)
    command = ["-m", "outrider", "relay", "--store", postgres_url, "--broker", "null://", "--until-empty", "--json"]
    status, megabytes = await asyncio.to_thread(_run, [*command, "--log-level", "error"])
    assert status == 0
    assert await conn.fetchval("SELECT count(*) FROM outrider.outbox") == 0
    assert await conn.fetchval("SELECT count(*) FROM outrider.outbox_archive") == EVENTS
    assert megabytes < MEGABYTES_MAX
    await conn.close()


LAUNCHER = """
import os, sys
pid = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ)
_, status, usage = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024)
"""


def _run(command: list[str]) -> tuple[int, float]:
    """Run Python; return its exit code and the most memory it had.

    The kernel counts what the parent had when it started the child, and a process that has run other tests had much.
    """
    output = subprocess.run([sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True, check=True)
    status, megabytes = output.stdout.splitlines()[-1].split()
    return int(status), float(megabytes)
