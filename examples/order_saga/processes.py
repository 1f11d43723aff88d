"""The processes of a run, started as you would start them: a worker or a consumer for each service, and its relay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from examples.order_saga.services import RELAY, SERVICES, Locations, Service
from outrider import OutriderError

ROOT = Path(__file__).resolve().parent.parent.parent
"""Where `examples` can be imported from."""
SHUTDOWN_TIMEOUT_SECONDS = 20.0


def outrider(locations: Locations, service: Service, *arguments: str) -> str:
    """Run a command that ends, such as `outrider saga reasons`, and return what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *arguments],
        cwd=ROOT,
        env=locations.environment(service),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OutriderError(f"outrider {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


@dataclass(slots=True)
class ProcessGroup:
    """Processes that run until they are told to stop."""

    locations: Locations
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, service: Service, *arguments: str) -> None:
        """Start one; what it says goes to a file."""
        # Whatever happens to this process, the kernel stops that one too.
        options = ("--log-level", "warning", "--parent", str(os.getpid()))
        with self._output(name).open("wb") as output:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "outrider", *arguments, *options],
                cwd=ROOT,
                env=self.locations.environment(service),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in a terminal then reaches this process alone, and the others are asked once.
                start_new_session=True,
            )

    def check(self) -> None:
        """One that ends unasked is a finding."""
        for name, process in self.running.items():
            if (code := process.poll()) is not None:
                raise OutriderError(f"{name} ended by itself with exit code {code}: {self.last_line(name)}")

    def last_line(self, name: str) -> str:
        """Return the last line that one has said."""
        lines = self._output(name).read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip(" |+-")), "it said nothing")

    def stop(self) -> None:
        """Ask all for a clean stop, and end those that take too long."""
        for process in self.running.values():
            process.terminate()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        for process in self.running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()

    def _output(self, name: str) -> Path:
        return self.locations.directory / f"{name}.txt"


@contextmanager
def run_services(locations: Locations) -> Iterator[ProcessGroup]:
    """Run all services around the block; afterwards no process is left."""
    processes = ProcessGroup(locations)
    try:
        for service in SERVICES:
            processes.start(service.name, service, *service.command)
            processes.start(f"{service.name}-relay", service, *RELAY)
        yield processes
    finally:
        processes.stop()
