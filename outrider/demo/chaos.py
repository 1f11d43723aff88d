"""Relays and a consumer as processes, and their kills.

A process is killed only while work is left, and only after progress since the last kill; a new process starts at once.
The other relays learn of a kill when the lease ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider import config
from outrider.cli.processes import child_command
from outrider.config import Config
from outrider.demo.shop import DemoFiles
from outrider.errors import Permanent
from outrider.outbox.settings import RelaySettings

RELAYS = 2
RELAY_KILLS = 3
CONSUMER_KILLS = 2
SETTINGS = RelaySettings(lease_seconds=2, publish_timeout_seconds=0.8)
SHUTDOWN_TIMEOUT_SECONDS = 3.0


def kill_at(kills: int, kills_planned: int, orders: int, done_at_last: int) -> int:
    """Return the number of finished events at which the next kill is due; kills are spread over the run.

    >>> kill_at(0, 3, 4000, 0), kill_at(1, 3, 4000, 1000), kill_at(2, 3, 4000, 3300)
    (1000, 2000, 3400)
    """
    return max(orders * (kills + 1) // (kills_planned + 1), done_at_last + orders // 40)


@dataclass(slots=True)
class DemoProcesses:
    """Processes of one kind, oldest first."""

    kind: str
    directory: Path
    command: Sequence[str]
    chosen: Config
    size: int
    kills_planned: int
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    exited: list[subprocess.Popen[bytes]] = field(default_factory=list)
    done_at_last: int = 0

    @property
    def kills(self) -> int:
        """Count the processes that ended by SIGKILL, by their exit codes."""
        return sum(process.returncode == -signal.SIGKILL for process in self.exited)

    def start_all(self) -> None:
        """Start all processes."""
        for _ in range(self.size):
            self.start()

    def start(self) -> None:
        """Start a process; output goes to a file, settings come through the environment."""
        foreign = {name: value for name, value in os.environ.items() if not name.startswith(config.PREFIX)}
        with self._output().open("wb") as output:
            process = subprocess.Popen(
                self.command,
                env={**foreign, **config.variables(self.chosen)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.running.append(process)

    def kill_if_due(self, done: int, unfinished: bool, orders: int) -> None:
        """Kill a process if a kill is due and work is left."""
        if self.kills < self.kills_planned and unfinished and done >= self._kill_at(orders):
            self.done_at_last = done
            self.kill_one()

    def kill_one(self) -> None:
        """Kill the oldest process, as a power cut would, and start a new one."""
        victim = self.running.pop(0)
        victim.kill()
        victim.wait()
        self.exited.append(victim)
        self.start()

    def check(self) -> None:
        """Raise an error if a process has ended by itself."""
        for process in self.running:
            if (code := process.poll()) is not None:
                raise Permanent(f"a {self.kind} ended by itself with exit code {code}: {self._last_lines()}")

    def stop(self) -> None:
        """Ask all processes for a clean stop, and kill the slow ones."""
        for process in self.running:
            process.terminate()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        for process in self.running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()

    def _kill_at(self, orders: int) -> int:
        return kill_at(self.kills, self.kills_planned, orders, self.done_at_last)

    def _output(self) -> Path:
        return self.directory / f"{self.kind}-{len(self.running) + len(self.exited) + 1}.txt"

    def _last_lines(self) -> str:
        # Without the frame that Python draws around exception groups.
        texts = [path.read_text(errors="replace") for path in sorted(self.directory.glob(f"{self.kind}-*.txt"))]
        lines = [[line.strip(" |+-") for line in text.splitlines()] for text in texts]
        return " / ".join(said[-1] for said in (list(filter(None, each)) for each in lines) if said) or "no output"


def relays(files: DemoFiles) -> DemoProcesses:
    """Return the relays between the shop's outbox and the log."""
    chosen = Config(store=files.store_url, broker=files.broker_url, relay=SETTINGS)
    return DemoProcesses(
        "relay", files.directory, child_command(["--log-level", "warning"]), chosen, RELAYS, RELAY_KILLS
    )


def consumers(files: DemoFiles) -> DemoProcesses:
    """Return the consumer of the log: one process."""
    chosen = Config(store=files.inbox_url, broker=files.broker_url)
    program = [sys.executable, "-m", "outrider", "consume", "outrider.demo.shop:inbox"]
    options = ["--parent", str(os.getpid()), "--log-level", "warning"]
    return DemoProcesses("consumer", files.directory, [*program, *options], chosen, 1, CONSUMER_KILLS)
