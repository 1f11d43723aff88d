"""A saga worker whose local step kills the process with SIGKILL: every time for a guilty saga, or some times in all."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outrider
from outrider import RetryPolicy, app
from outrider.cli.processes import die_with_parent
from outrider.saga import Saga, SagaRegistry, SagaSettings, SagaWorker, StepContext

SETTINGS = SagaSettings(lease_seconds=0.6, poll_seconds_max=0.05, shutdown_timeout_seconds=5)
GUILTY, UNLUCKY, INNOCENT = "guilty", "unlucky", "innocent"
TABLES = "CREATE TABLE done (name text PRIMARY KEY);"


@dataclass
class Job:
    """The work of a saga. A guilty one kills every worker, an unlucky one the first `kills` workers."""

    name: str
    kills: int = 0


def job_saga(folder: Path) -> Saga[Job]:
    """Return a saga of one local step, with one attempt."""
    saga = Saga("job", Job)

    @saga.local(retry=RetryPolicy(max_attempts=1))
    async def work(run: StepContext[Job], tx: Any) -> None:
        await tx.execute("INSERT INTO done (name) VALUES ($1)", run.state.name)
        if run.state.name.startswith(INNOCENT):
            # Runs while the guilty one does, so that it is lost with it.
            await tx.execute("SELECT pg_sleep(0.2)")
        if run.state.name == GUILTY:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.state.kills and _count(folder / run.state.name) <= run.state.kills:
            os.kill(os.getpid(), signal.SIGKILL)

    return saga


def _count(path: Path) -> int:
    with path.open("a") as file:
        file.write(".")
    return len(path.read_text())


async def main(store_url: str, folder: Path) -> None:
    """Work until killed, or asked to stop."""
    store = await app.open_sagas(store_url)
    worker = SagaWorker(store, SagaRegistry(job_saga(folder)), outrider.stage, SETTINGS, app.log_observer())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()
    await store.close()


def work(store_url: str, folder: Path) -> None:
    """Be a process that works, and says what it does in a file."""
    with (folder / "workers.log").open("ab", buffering=0) as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    die_with_parent(os.getppid())
    app.configure_logging(json=True, level="WARNING")
    asyncio.run(main(store_url, folder))
