"""Several processes of one command under one parent, and signals.

A child that exits with 0 is done; a crashed child is restarted after a growing pause. A child that reports an error
(invalid settings, an unreachable server) stops the whole group, unless a child has run steadily before: then the error
may pass, and the child is restarted. Children get their settings through the environment, because a command line is
public, and print their counts in their last line.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import typer

from outrider import app, config
from outrider.cli.output import UNREACHABLE, USAGE
from outrider.config import Config
from outrider.retry import RetryPolicy
from outrider.telemetry.events import Observer, TelemetryEvent

RESTART = RetryPolicy(base_seconds=0.5, cap_seconds=30)

FINITE = ("--until-empty", "--until-idle")

STEADY_SECONDS = 60.0
"""After a run of this length the next pause is short again: the child has started successfully."""

PROGRAM: ContextVar[Sequence[str]] = ContextVar("program", default=("-m", "outrider"))
"""The arguments with which Python starts this command line."""

REPORTED = (USAGE, UNREACHABLE)
"""Exit codes of a child that has printed its error."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_PR_SET_PDEATHSIG = 1

_OBJECTS_BETWEEN_COLLECTIONS = 50_000


@dataclass(frozen=True, slots=True)
class ProcessStarted(TelemetryEvent):
    """A process has started."""

    pid: int


@dataclass(frozen=True, slots=True)
class ProcessCrashed(TelemetryEvent):
    """A process has ended unexpectedly; a new process starts after the pause."""

    pid: int
    exit_code: int
    restart_seconds: float

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class ProcessFailed(TelemetryEvent):
    """A process has reported an error and ended; a new process starts after the pause."""

    pid: int
    exit_code: int
    restart_seconds: float

    level: ClassVar[str] = "error"


def child_options(*, until_empty: bool, as_json: bool) -> list[str]:
    """Return the options of a child; its settings come through the environment."""
    flags = {"--until-empty": until_empty, "--json": as_json}
    return [flag for flag, wanted in flags.items() if wanted]


def child_command(options: list[str], command: Sequence[str] = ("relay",)) -> list[str]:
    """Return the command line of a child of this process."""
    return [sys.executable, *PROGRAM.get(), *command, "--processes", "1", "--parent", str(os.getpid()), *options]


async def supervise(
    chosen: Config,
    options: list[str],
    command: Sequence[str] = ("relay",),
    *,
    shutdown_timeout_seconds: float | None = None,
) -> dict[str, int]:
    """Run the processes until they are done or a signal comes; return the sum of their counts, or exit with their code.

    A child prints its counts by name, as JSON, in its last line.
    """
    environment = {**os.environ, **config.variables(chosen)}
    # Only a child with an option to stop when done may end by itself; any other child is replaced.
    finite = any(option in FINITE for option in options)
    group = ProcessGroup(child_command(options, command), environment, finite=finite)
    # Twice the time of a child; a relay gives up its own clean stop after a lease.
    with on_stop_signals(group.stop, shutdown_seconds=2 * (shutdown_timeout_seconds or chosen.relay.lease_seconds)):
        codes = await asyncio.gather(*(group.supervise_child() for _ in range(chosen.processes)))
    if code := group.exit_code or max(codes):
        raise typer.Exit(code)
    return dict(group.counts)


class ProcessGroup:
    """The children of this process, and the sum of their counts."""

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
        self.exit_code = 0
        """The exit code of the child that stopped the group."""
        self._command, self._environment, self._finite = command, environment, finite
        self._steady_seconds = steady_seconds
        self._observer = observer or app.log_observer()
        self._rng = random.Random()
        self._steady = False
        self._stopping = asyncio.Event()
        self._children: dict[Process, float] = {}

    def stop(self) -> None:
        """Ask every child for a clean stop, and start no more children."""
        self._stopping.set()
        for child in self._children:
            if child.returncode is None:
                # Not `child.terminate()`: it would poll the child, and take the exit code from `_run`, which waits.
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)

    async def supervise_child(self) -> int:
        """Run one child, and restart it when it crashes; return the last exit code."""
        crashes = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            pid, code = await self._run()
            if self._stopping.is_set() or (code == 0 and self._finite):
                return max(code, 0)
            if code in REPORTED and not self._steady:
                self.exit_code = code
                self.stop()
                return code
            crashes = 1 if self._was_steady(started) else crashes + 1
            await self._pause(pid, code, RESTART.delay_seconds(crashes, self._rng))
        return 0

    async def _run(self) -> tuple[int, int]:
        # In a session of its own, so Ctrl-C in a terminal reaches only the parent, which stops the children once.
        child = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, stdout=PIPE, start_new_session=True
        )
        self._children[child] = time.monotonic()
        self._observer.emit(ProcessStarted(child.pid))
        if self._stopping.is_set():
            self.stop()
        output, _ = await child.communicate()
        self._steady |= any(map(self._was_steady, self._children.values()))
        del self._children[child]
        code = await child.wait()
        if code == 0:
            self.counts.update(json.loads(output.splitlines()[-1]))
        return child.pid, code

    def _was_steady(self, started: float) -> bool:
        return time.monotonic() - started >= self._steady_seconds

    async def _pause(self, pid: int, code: int, seconds: float) -> None:
        kind = ProcessFailed if code in REPORTED else ProcessCrashed
        self._observer.emit(kind(pid, code, round(seconds, 2)))
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


@contextmanager
def on_stop_signals(stop: Callable[[], None], *, shutdown_seconds: float) -> Iterator[None]:
    """Call `stop` on the first signal; end the process on the second, or when the clean stop takes too long."""
    loop = asyncio.get_running_loop()
    requested: list[int] = []

    def on_signal(number: int) -> None:
        requested.append(number)
        if len(requested) > 1:
            os._exit(128 + number)
        loop.call_later(shutdown_seconds, os._exit, 128 + number)
        stop()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Run the garbage collector rarely: events are never part of a cycle, and collecting took 20 % of a busy relay.

    Objects that exist already are frozen, and not scanned again. ::

        with collect_rarely():
            await relay.run()
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def die_with_parent(parent: int) -> None:
    """Stop this process when its parent ends, for any reason. Only Linux supports the mechanism."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended before the call.
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
