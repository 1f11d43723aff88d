"""Several relay processes under one parent.

A child that ends well is done, one that cannot work as it was told stops everything, and one that crashes is started
again after a pause that grows. Children get their settings through the environment, because a command line is public.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from asyncio.subprocess import Process
from dataclasses import dataclass
from typing import ClassVar

from outrider import app, config
from outrider.backoff import RetryPolicy
from outrider.cli.errors import USAGE
from outrider.cli.process import on_stop_signals
from outrider.config import Config
from outrider.observer import Fact

RESTART = RetryPolicy(base_seconds=0.5, cap_seconds=30)
STEADY_SECONDS = 60.0
"""A child that ran this long had no trouble starting, so the pause is short again."""


@dataclass(frozen=True, slots=True)
class ProcessStarted(Fact):
    """A relay process began."""

    pid: int


@dataclass(frozen=True, slots=True)
class ProcessCrashed(Fact):
    """A relay process ended without being asked to; another takes its place after the pause."""

    pid: int
    exit_code: int
    restart_seconds: float

    level: ClassVar[str] = "error"


def child_options(*, until_empty: bool, json: bool) -> list[str]:
    """Return the options that a child takes over; everything else is a setting, and comes with the environment."""
    flags = {"--until-empty": until_empty, "--json": json}
    return [flag for flag, wanted in flags.items() if wanted]


def child_command(options: list[str]) -> list[str]:
    """Return how a single relay is started as a child of this process."""
    return [sys.executable, "-m", "outrider", "relay", "--processes", "1", "--parent", str(os.getpid()), *options]


async def supervise(chosen: Config, options: list[str]) -> int:
    """Keep the processes running until they are done or a signal comes; return the exit code."""
    crew = Crew(chosen, options)
    # Twice the lease: a child gives up its own clean stop after one.
    with on_stop_signals(crew.stop, give_up_seconds=2 * chosen.relay.lease_seconds):
        codes = await asyncio.gather(*(crew.keep() for _ in range(chosen.processes)))
    return max(codes)


class Crew:
    """The children, and the wish to stop them."""

    def __init__(self, chosen: Config, options: list[str]) -> None:
        self._command = child_command(options)
        # Only a relay that stops when it is done may end by itself; another one that does is replaced.
        self._finite = "--until-empty" in options
        self._environment = {**os.environ, **config.variables(chosen)}
        self._observer = app.log_observer()
        self._chance = random.Random()
        self._steady = False
        self._stopping = asyncio.Event()
        self._children: set[Process] = set()

    def stop(self) -> None:
        """Ask every child for a clean stop, and start no other."""
        self._stopping.set()
        for child in self._children:
            if child.returncode is None:
                child.send_signal(signal.SIGTERM)

    async def keep(self) -> int:
        """Keep one place filled; return its exit code."""
        crashes = 0
        while not self._stopping.is_set():
            begun = time.monotonic()
            pid, code = await self._run()
            self._steady |= time.monotonic() - begun > STEADY_SECONDS
            if code == USAGE and not self._steady:
                # It cannot work as it was told to. Once relays have worked, the trouble is elsewhere and may pass.
                self.stop()
            if self._stopping.is_set() or (code == 0 and self._finite):
                return max(code, 0)
            crashes = 1 if time.monotonic() - begun > STEADY_SECONDS else crashes + 1
            await self._pause(pid, code, RESTART.delay_seconds(crashes, self._chance))
        return 0

    async def _run(self) -> tuple[int, int]:
        # A session of its own: Ctrl-C in a terminal then reaches the parent alone, and children are asked once.
        child = await asyncio.create_subprocess_exec(*self._command, env=self._environment, start_new_session=True)
        self._children.add(child)
        self._observer.notice(ProcessStarted(child.pid))
        if self._stopping.is_set():
            self.stop()
        code = await child.wait()
        self._children.discard(child)
        return child.pid, code

    async def _pause(self, pid: int, code: int, seconds: float) -> None:
        self._observer.notice(ProcessCrashed(pid, code, round(seconds, 2)))
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
