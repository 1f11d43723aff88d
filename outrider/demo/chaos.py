"""Relays and a consumer as processes, and the one who kills them.

One is killed only while there is work left, and only after some was done since the last time; a new one takes its place
at once. Nothing is told to anybody: the others find out when the lease ends.
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
from outrider.cli.supervisor import child_command
from outrider.config import Config
from outrider.demo.places import Places
from outrider.errors import Permanent
from outrider.outbox.settings import RelaySettings

RELAYS = 2
RELAY_KILLS = 3
CONSUMER_KILLS = 2
SETTINGS = RelaySettings(lease_seconds=2, publish_timeout_seconds=0.8)
STOP_SECONDS = 3.0


def kill_at(kills: int, kills_planned: int, orders: int, done_at_last: int) -> int:
    """Return how many events must have been dealt with before the next kill: spread over the run, never two in a row.

    >>> kill_at(0, 3, 4000, 0), kill_at(1, 3, 4000, 1000), kill_at(2, 3, 4000, 3300)
    (1000, 2000, 3400)
    """
    return max(orders * (kills + 1) // (kills_planned + 1), done_at_last + orders // 40)


@dataclass(slots=True)
class Crew:
    """Processes of one kind, oldest first."""

    kind: str
    directory: Path
    command: Sequence[str]
    chosen: Config
    size: int
    kills_planned: int
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    gone: list[subprocess.Popen[bytes]] = field(default_factory=list)
    done_at_last: int = 0

    @property
    def kills(self) -> int:
        """Return how many processes ended by SIGKILL, by what the system says of them."""
        return sum(process.returncode == -signal.SIGKILL for process in self.gone)

    def muster(self) -> None:
        """Start all of them."""
        for _ in range(self.size):
            self.start()

    def start(self) -> None:
        """Start one. Its output goes to a file, its settings through the environment."""
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
        """Kill one if it is time for it, while there is work left."""
        if self.kills < self.kills_planned and unfinished and done >= self._kill_at(orders):
            self.done_at_last = done
            self.kill_one()

    def kill_one(self) -> None:
        """Kill the one that has run longest, as a power cut would, and start another."""
        victim = self.running.pop(0)
        victim.kill()
        victim.wait()
        self.gone.append(victim)
        self.start()

    def check(self) -> None:
        """One that ends unasked is a finding."""
        for process in self.running:
            if (code := process.poll()) is not None:
                raise Permanent(f"a {self.kind} ended by itself with exit code {code}: {self._last_words()}")

    def stop(self) -> None:
        """Ask all for a clean stop, and end those who take too long."""
        for process in self.running:
            process.terminate()
        give_up = time.monotonic() + STOP_SECONDS
        for process in self.running:
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()

    def _kill_at(self, orders: int) -> int:
        return kill_at(self.kills, self.kills_planned, orders, self.done_at_last)

    def _output(self) -> Path:
        return self.directory / f"{self.kind}-{len(self.running) + len(self.gone) + 1}.txt"

    def _last_words(self) -> str:
        """Return the last line of each one's output, without the frame Python draws around groups of errors."""
        texts = [path.read_text(errors="replace") for path in sorted(self.directory.glob(f"{self.kind}-*.txt"))]
        lines = [[line.strip(" |+-") for line in text.splitlines()] for text in texts]
        return (
            " / ".join(said[-1] for said in (list(filter(None, each)) for each in lines) if said) or "it said nothing"
        )


def relays(places: Places) -> Crew:
    """Return the relays between the shop's outbox and the log."""
    chosen = Config(store=places.store_url, broker=places.broker_url, relay=SETTINGS)
    return Crew("relay", places.directory, child_command(["--log-level", "warning"]), chosen, RELAYS, RELAY_KILLS)


def consumers(places: Places) -> Crew:
    """Return the consumer of the log, alone in its crew."""
    chosen = Config(store=places.inbox_url, broker=places.broker_url)
    program = [sys.executable, "-m", "outrider", "consume", "outrider.demo.billing:inbox"]
    options = ["--parent", str(os.getpid()), "--log-level", "warning"]
    return Crew("consumer", places.directory, [*program, *options], chosen, 1, CONSUMER_KILLS)
