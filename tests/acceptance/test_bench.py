"""The benchmarks run as people call them; their figures are no matter of tests."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE

TIMEOUT_SECONDS = 120
SMALL = "--only throughput,staging,payload --events 2000 --seconds 0.5 --transactions 5 --rounds 1 --json"


async def test_the_benchmarks_measure_relays_in_processes_of_their_own_and_name_the_clients() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench", *SMALL.split(), stdout=PIPE)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        output, _ = await process.communicate()
    report = json.loads(output)
    drained = {drain["design"]: drain["events"] for drain in report["drain"]}
    assert drained["outrider, archive, 2 processes"] > 0
    assert drained["outrider, delete, 2 processes"] > 0
    assert "with a schema" in report["payload"]
    assert {"asyncpg", "confluent-kafka", "aio-pika", "pymongo"} <= report["machine"].keys()
