"""Relay processes as people run them, and the processor time of whoever takes part."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from outrider.telemetry.events import PassCompleted
from outrider.telemetry.log_observer import words
from outrider.testing.servers.server import children_of

SHUTDOWN_TIMEOUT_SECONDS_MAX = 30
PASS_COMPLETED = words(PassCompleted)
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Relays:
    """Relays at work. What they have settled is read from their log, so that watching costs the database nothing."""

    process: Process

    @property
    def pid(self) -> int:
        """The process, which is the parent if there are several."""
        return self.process.pid

    async def settled(self, at_least: int = 1) -> int:
        """Wait until so many more events are settled; return how many it were."""
        assert self.process.stderr is not None
        count = 0
        while count < at_least:
            line = await self.process.stderr.readline()
            if not line:
                raise RuntimeError("the relay has ended before its work was done")
            count += _settled(line)
        return count


def _settled(line: bytes) -> int:
    with suppress(ValueError):
        event = json.loads(line)
        return int(event["settled"]) if event.get("message") == PASS_COMPLETED else 0
    # A warning of Python's, for instance; it should be seen.
    sys.stderr.buffer.write(line)
    return 0


@asynccontextmanager
async def relays(store: str, broker: str, *, processes: int = 1, archive: bool = True) -> AsyncIterator[Relays]:
    """Run `outrider relay` around the block."""
    stores = ["--store", store, "--broker", broker]
    options = ["--processes", str(processes), "--archive" if archive else "--no-archive"]
    command = [sys.executable, "-m", "outrider", "relay", *stores, *options, "--log-level", "debug", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
    try:
        yield Relays(process)
    finally:
        process.terminate()
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_SECONDS_MAX):
            await process.communicate()


@dataclass(slots=True)
class Watch:
    """How long something took, by the clock and in processor seconds of each process that is watched."""

    pids: dict[str, int]
    seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> Watch:
        self.cpu_seconds = self._cpu()
        self.seconds = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self.seconds
        self.cpu_seconds = {name: spent - self.cpu_seconds[name] for name, spent in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self.pids.items()}


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its children, those that have ended included; of our own without."""
    if pid == os.getpid():
        return time.process_time()
    return _own_cpu_seconds(pid) + sum(map(_own_cpu_seconds, children_of(pid)))


def _own_cpu_seconds(pid: int) -> float:
    with suppress(OSError):
        # The name is in parentheses and may hold spaces. Behind it are the times, and those of children that ended.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS_PER_SECOND
    return 0.0
