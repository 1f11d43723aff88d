"""Saga workers as processes that run families: a trip that has an order as its child, which has two parcels as its own.

Every effect is a line in a ledger, under the idempotency key of its step. The ledger forbids nothing, so an effect that
happens twice is seen.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

import outrider
from outrider import app
from outrider.cli.processes import die_with_parent
from outrider.saga import Saga, SagaRegistry, SagaSettings, SagaWorker, StepContext, StepRejected
from tests.support.saga_ledger import BANK_EFFECT, OFTEN, WRITE

SETTINGS = SagaSettings(lease_seconds=0.6, poll_seconds_max=0.05, shutdown_timeout_seconds=5)
FINE, DECLINED, LOST = "fine", "declined", "lost"
"""The name of a trip begins with its outcome: all accept, the last step is declined, or a parcel is lost."""
PARCELS = ["a", "b"]
STEPS = ("book", "create", "pack", "pack", "label", "label")
"""The steps with an effect, in a family that is whole."""


@dataclass
class Trip:
    """The state of each saga of a family. `parcel` is empty in a trip and in its order."""

    name: str
    parcel: str = ""


def trip_saga(pool: Any) -> SagaRegistry:
    """Define a family of three generations. The pool is for the calls, which are outside the transactions of sagas."""
    parcel, order, trip = Saga("parcel", Trip), Saga("order", Trip), Saga("trip", Trip)
    _add_local(trip, "book")
    trip.child(order, input=lambda state: state, name="order")
    _add_local(order, "create")
    order.child(
        parcel, input=lambda state, item: Trip(state.name, item), for_each=lambda state: PARCELS, name="parcels"
    )
    _add_local(parcel, "pack")

    async def act(run: StepContext[Trip], amount: int) -> None:
        await pool.execute(BANK_EFFECT, run.key, str(run.phase), run.key, "label", amount)

    @parcel.call(retry=OFTEN)
    async def label(run: StepContext[Trip]) -> None:
        if run.state.name.startswith(LOST) and run.state.parcel == PARCELS[-1]:
            raise StepRejected("no such address")
        await act(run, 1)

    @label.compensate(retry=OFTEN)
    async def void(run: StepContext[Trip]) -> None:
        await act(run, -1)

    @trip.call(retry=OFTEN)
    async def pay(run: StepContext[Trip]) -> None:
        if run.state.name.startswith(DECLINED):
            raise StepRejected("the card was declined")

    return SagaRegistry(trip, order, parcel)


def _add_local(saga: Saga[Trip], name: str) -> None:
    async def act(run: StepContext[Trip], tx: Any) -> None:
        await tx.execute(WRITE, run.key, name, 1)

    async def undo(run: StepContext[Trip], tx: Any) -> None:
        await tx.execute(WRITE, run.key, name, -1)

    saga.local(name=name, retry=OFTEN)(act).compensate(retry=OFTEN)(undo)


async def main(store_url: str) -> None:
    """Work until killed, or asked to stop."""
    pool = await asyncpg.create_pool(store_url, min_size=1, max_size=2)
    store = await app.open_sagas(store_url)
    worker = SagaWorker(store, trip_saga(pool), outrider.stage, SETTINGS, app.log_observer())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()
    await store.close()
    await pool.close()


def work(store_url: str, folder: Path) -> None:
    """Be a process that works, and says what it does in a file."""
    with (folder / "workers.log").open("ab", buffering=0) as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    die_with_parent(os.getppid())
    app.configure_logging(json=True, level="WARNING")
    asyncio.run(main(store_url))
