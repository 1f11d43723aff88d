"""Several processes of one command under one parent.

A child that ends well is done, and one that crashes is started again after a pause that grows. One that reports an
error before any child has been steady stops everything, as it would stop a single relay: it was told wrong, or a server
is not there. Once relays have worked, the trouble may pass, and it is started again. Children get their settings by the
environment, because a command line is public, and tell in their last line what they have done.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import typer

from outrider import app, config
from outrider.backoff import RetryPolicy
from outrider.cli.errors import UNREACHABLE, USAGE
from outrider.cli.process import on_stop_signals
from outrider.config import Config
from outrider.observer import Fact, Observer

RESTART = RetryPolicy(base_seconds=0.5, cap_seconds=30)
FINITE = ("--until-empty", "--until-idle")
STEADY_SECONDS = 60.0
"""A child that ran this long had no trouble starting, so the pause is short again."""
PROGRAM: ContextVar[Sequence[str]] = ContextVar("program", default=("-m", "outrider"))
"""How Python starts our command line, inside of whatever it was started in."""
REPORTED = (USAGE, UNREACHABLE)
"""Exit codes of a child that has said itself what is wrong."""


@dataclass(frozen=True, slots=True)
class ProcessStarted(Fact):
    """A process began."""

    pid: int


@dataclass(frozen=True, slots=True)
class ProcessCrashed(Fact):
    """A process ended without being asked to; another takes its place after the pause."""

    pid: int
    exit_code: int
    restart_seconds: float

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class ProcessFailed(Fact):
    """A relay process reported an error and ended; another takes its place after the pause."""

    pid: int
    exit_code: int
    restart_seconds: float

    level: ClassVar[str] = "error"


def child_options(*, until_empty: bool, as_json: bool) -> list[str]:
    """Return the options that a child takes over; everything else is a setting, and comes with the environment."""
    flags = {"--until-empty": until_empty, "--json": as_json}
    return [flag for flag, wanted in flags.items() if wanted]


def child_command(options: list[str], command: Sequence[str] = ("relay",)) -> list[str]:
    """Return how a single one is started as a child of this process."""
    return [sys.executable, *PROGRAM.get(), *command, "--processes", "1", "--parent", str(os.getpid()), *options]


async def supervise(
    chosen: Config, options: list[str], command: Sequence[str] = ("relay",), *, stop_seconds: float | None = None
) -> dict[str, int]:
    """Keep the processes running until they are done or a signal comes; return what they did, or exit as they did.

    Each child tells in its last line what it has done, as counts by name.
    """
    environment = {**os.environ, **config.variables(chosen)}
    # Only one that was told to stop when it is done may end by itself; another one that does is replaced.
    finite = any(option in FINITE for option in options)
    crew = Crew(child_command(options, command), environment, finite=finite)
    # Twice as long as a child, which gives up its own clean stop after a lease if it is a relay.
    with on_stop_signals(crew.stop, give_up_seconds=2 * (stop_seconds or chosen.relay.lease_seconds)):
        codes = await asyncio.gather(*(crew.keep() for _ in range(chosen.processes)))
    if code := crew.verdict or max(codes):
        raise typer.Exit(code)
    return dict(crew.counts)


class Crew:
    """The children, what they have done, and the wish to stop them."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        *,
        finite: bool,
        steady_seconds: float = STEADY_SECONDS,
        observer: Observer | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.verdict = 0
        """The exit code of the child that stopped everything."""
        self._command, self._environment, self._finite = command, environment, finite
        self._steady_seconds = steady_seconds
        self._observer = observer or app.log_observer()
        self._chance = random.Random()
        self._steady = False
        self._stopping = asyncio.Event()
        self._children: dict[Process, float] = {}

    def stop(self) -> None:
        """Ask every child for a clean stop, and start no other."""
        self._stopping.set()
        for child in self._children:
            if child.returncode is None:
                # Not through the child's own method: that looks whether it has ended, and so takes its exit code from
                # whoever waits for it.
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)

    async def keep(self) -> int:
        """Keep one place filled; return its exit code."""
        crashes = 0
        while not self._stopping.is_set():
            begun = time.monotonic()
            pid, code = await self._run()
            if self._stopping.is_set() or (code == 0 and self._finite):
                return max(code, 0)
            if code in REPORTED and not self._steady:
                self.verdict = code
                self.stop()
                return code
            crashes = 1 if self._was_steady(begun) else crashes + 1
            await self._pause(pid, code, RESTART.delay_seconds(crashes, self._chance))
        return 0

    async def _run(self) -> tuple[int, int]:
        # A session of its own: Ctrl-C in a terminal then reaches the parent alone, and children are asked once.
        child = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, stdout=PIPE, start_new_session=True
        )
        self._children[child] = time.monotonic()
        self._observer.notice(ProcessStarted(child.pid))
        if self._stopping.is_set():
            self.stop()
        told, _ = await child.communicate()
        self._steady |= any(map(self._was_steady, self._children.values()))
        del self._children[child]
        code = await child.wait()
        if code == 0:
            self.counts.update(json.loads(told.splitlines()[-1]))
        return child.pid, code

    def _was_steady(self, begun: float) -> bool:
        return time.monotonic() - begun >= self._steady_seconds

    async def _pause(self, pid: int, code: int, seconds: float) -> None:
        kind = ProcessFailed if code in REPORTED else ProcessCrashed
        self._observer.notice(kind(pid, code, round(seconds, 2)))
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
