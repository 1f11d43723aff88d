"""Erasures that are killed with SIGKILL before and after each of their commits: the next run finishes them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.testing.contracts.erasure import ANN, BOB, CANARY, NEIGHBOUR, ErasureBench
from tests.support.erasure_benches import postgres_bench, sqlite_bench

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = "tests.support.killed_erasure"

COMMITS = [
    "open_run",
    "erase_events",
    "erase_events",
    "erase_saga",
    "erase_events",
    "destroy",
    "destroy",
    "finish_run",
]
"""The commits of a run, in their order. The second destruction looks for a key that was made meanwhile."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A database, and its URL for other processes."""

    bench: ErasureBench
    url: str

    async def kill(self, commit: int, moment: str) -> tuple[int, str]:
        """Run an erasure in a process of its own; return its exit code and its last words."""
        arguments = ["-m", SCRIPT, self.url, ANN, str(commit), moment]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        return process.returncode or 0, said.decode().strip()


async def _each_kill_is_harmless(victim: Victim) -> None:
    bench, died = victim.bench, list[str]()
    await bench.fill(BOB)
    before = await bench.readable(NEIGHBOUR)
    for number in range(1, len(COMMITS) + 1):
        for moment in ("before", "after"):
            await bench.fill(ANN, f"{number} {moment}")
            code, name = await victim.kill(number, moment)
            assert code == -signal.SIGKILL
            died.append(name)
            [result] = await bench.run().run()
            assert result.is_complete
            assert await bench.readable(CANARY) == []
            assert await bench.readable(NEIGHBOUR) == before
            await bench.audit_is_sound()
    assert died[::2] == died[1::2] == COMMITS
    rows: Mapping[str, list[str]] = await bench.dump()
    assert (await victim.kill(1_000, "before"))[0] == 0
    assert await bench.dump() == rows


async def test_a_kill_at_any_commit_is_harmless_on_sqlite(sqlite_path: Path) -> None:
    async with sqlite_bench(sqlite_path) as bench:
        await _each_kill_is_harmless(Victim(bench, f"sqlite:///{sqlite_path}"))


@pytest.mark.postgres
async def test_a_kill_at_any_commit_is_harmless_on_postgresql(postgres_url: str) -> None:
    async with postgres_bench(postgres_url) as bench:
        await _each_kill_is_harmless(Victim(bench, postgres_url))
