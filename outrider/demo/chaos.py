"""Two relays as processes, and the one who kills them.

A relay is killed only while undelivered events remain, and only after events were delivered since the last time; a new
one takes its place at once. Nothing is told to anybody: the others find out when the lease ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from outrider import config
from outrider.cli.supervisor import child_command
from outrider.config import Config
from outrider.demo.places import Places
from outrider.errors import Permanent
from outrider.outbox.settings import RelaySettings

RELAYS = 2
KILLS = 3
SETTINGS = RelaySettings(lease_seconds=2, publish_timeout_seconds=0.8)
STOP_SECONDS = 3.0


def kill_at(kills: int, orders: int, sent_at_last: int) -> int:
    """Return how many events must have been settled before the next kill: spread over the run, never two in a row.

    >>> kill_at(0, 4000, 0), kill_at(1, 4000, 1000), kill_at(2, 4000, 3300)
    (1000, 2000, 3400)
    """
    return max(orders * (kills + 1) // (KILLS + 1), sent_at_last + orders // 40)


@dataclass(slots=True)
class Crew:
    """The relay processes, oldest first."""

    places: Places
    relays: list[subprocess.Popen[bytes]] = field(default_factory=list)
    gone: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sent_at_last: int = 0

    @property
    def kills(self) -> int:
        """Return how many processes ended by SIGKILL, by what the system says of them."""
        return sum(relay.returncode == -signal.SIGKILL for relay in self.gone)

    def muster(self) -> None:
        """Start all relays."""
        for _ in range(RELAYS):
            self.start()

    def start(self) -> None:
        """Start one relay. Its output goes to a file, its settings through the environment."""
        chosen = Config(store=self.places.store_url, broker=self.places.broker_url, relay=SETTINGS)
        foreign = {name: value for name, value in os.environ.items() if not name.startswith(config.PREFIX)}
        with self._output().open("wb") as output:
            relay = subprocess.Popen(
                child_command(["--log-level", "warning"]),
                env={**foreign, **config.variables(chosen)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.relays.append(relay)

    def kill_if_due(self, sent: int, unfinished: bool, orders: int) -> None:
        """Kill a relay if it is time for it, while orders are still to be written or delivered."""
        if self.kills < KILLS and unfinished and sent >= kill_at(self.kills, orders, self.sent_at_last):
            self.sent_at_last = sent
            self.kill_one()

    def kill_one(self) -> None:
        """Kill the relay that has run longest, as a power cut would, and start another."""
        victim = self.relays.pop(0)
        victim.kill()
        victim.wait()
        self.gone.append(victim)
        self.start()

    def check(self) -> None:
        """A relay that ends unasked is a finding."""
        for relay in self.relays:
            if (code := relay.poll()) is not None:
                raise Permanent(f"a relay ended by itself with exit code {code}: {self._last_words()}")

    def stop(self) -> None:
        """Ask all for a clean stop, and end those who take too long."""
        for relay in self.relays:
            relay.terminate()
        give_up = time.monotonic() + STOP_SECONDS
        for relay in self.relays:
            try:
                relay.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                relay.kill()
                relay.wait()
        self.relays.clear()

    def _output(self) -> Path:
        return self.places.directory / f"relay-{len(self.relays) + len(self.gone) + 1}.txt"

    def _last_words(self) -> str:
        """Return the last line of each relay's output, without the frame Python draws around groups of errors."""
        texts = [path.read_text(errors="replace") for path in sorted(self.places.directory.glob("relay-*.txt"))]
        lines = [[line.strip(" |+-") for line in text.splitlines()] for text in texts]
        return (
            " / ".join(said[-1] for said in (list(filter(None, each)) for each in lines) if said) or "it said nothing"
        )
