"""A saga worker, with the consumer of its replies, that kills itself with SIGKILL at a chosen point of its work.

It dies when it passes the point for the given time; with the point `never` it works until it is stopped. Each point
wraps the real thing from outside: the stores, the source, what stages, and the functions of the steps. Before it dies
at a turn it writes down which saga's, so that a test can see whether the turn was committed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

import outrider
from outrider import Event, app
from outrider.cli.processes import die_with_parent
from outrider.handler_transactions import TransactionSource
from outrider.inbox.consumer import Consumer
from outrider.saga import SagaRegistry, SagaSettings, SagaWorker
from outrider.saga.model import Claim, SagaChange, SagaRecord
from outrider.saga.store import SagaStore
from tests.support.crashing_consumer import NEVER, Fuse, FusedSource, FusedStore
from tests.support.saga_ledger import order_saga

SETTINGS = SagaSettings(lease_seconds=0.6, poll_seconds_max=0.05, shutdown_timeout_seconds=5)
CALL_SECONDS, REPLY_SECONDS = 5.0, 2.0

INTENTS = {
    ("create", "action"): "create started",
    ("reserve", "action"): "reserve asked",
    ("charge", "action"): "reservation taken in, charge started",
    ("wrap[0]", "action"): "charge done, list frozen, wrap[0] started",
    ("wrap[1]", "action"): "wrap[0] done, wrap[1] started",
    ("cool_down", "action"): "wrap done or skipped, timer set",
    ("ship", "action"): "timer passed, ship started",
    ("confirm", "action"): "ship done, confirm started",
    ("wrap[1]", "compensation"): "ship rejected, unwrap[1] started",
    ("charge", "compensation"): "unwrap[0] done, refund started",
    ("reserve", "compensation"): "refund done, release asked",
    ("create", "compensation"): "release taken in, cancel started",
}
"""The name of a turn that starts a step: it records the step before in the same transaction."""
TURNS = (*INTENTS.values(), "completed", "compensated")
UNSAVED, SAVED, COMMIT_SENT, COMMITTED = "not saved yet", "saved", "commit sent", "committed"
MOMENTS = (UNSAVED, SAVED, COMMIT_SENT, COMMITTED)
FUNCTIONS = (
    *("create effected", "charge called", "charge effected", "wrap called", "wrap effected", "ship called"),
    *("ship effected", "confirm effected", "unwrap effected"),
    *("refund called", "refund effected", "cancel effected"),
)
STAGED = ("stock.reserve staged", "stock.release staged")
CLAIMS = ("claim asked", "claimed")
REPLIES = ("received", "receipt_written", "handler_done", "commit_sent", "committed_not_acked")
REPLY = "reply: "
"""The prefix of the points of the consumer of replies; the rest are those of any consumer."""
POINTS = (
    *CLAIMS,
    *(f"{turn}: {moment}" for turn in TURNS for moment in MOMENTS),
    *FUNCTIONS,
    *STAGED,
    *(f"{REPLY}{point}" for point in REPLIES),
)


class SagaFuse(Fuse):
    """A fuse that can leave a note of the turn it blew at."""

    def __init__(self, point: str, count: int, note: Path) -> None:
        super().__init__(point, count)
        self._note = note

    def burn_at(self, point: str, saving: Saving) -> None:
        """Die at a moment of a turn, if it is time to."""
        if self.due(point):
            self.die_at(saving)

    def die_at(self, saving: Saving) -> None:
        """Write down whose turn it is, and die."""
        self._note.write_text(json.dumps({"saga_id": str(saving.saga_id), "version": saving.version}))
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Saving:
    """A turn that is being saved: whose, what it is called, and the version that it changes."""

    saga_id: UUID
    version: int
    names: tuple[str, ...]


def names_of(turn: SagaChange) -> tuple[str, ...]:
    """Name a turn by what it starts, and by how the saga ended with it."""
    is_started = [(entry.step, entry.phase.value) for entry in turn.entries if entry.status == "started"]
    names = [INTENTS[step] for step in is_started if step in INTENTS]
    return (*names, turn.instance.status) if turn.instance.status in TURNS else tuple(names)


class WatchedSource:
    """A source of transactions that are watched."""

    def __init__(self, source: TransactionSource, watched: Callable[..., AbstractAsyncContextManager[Any]]) -> None:
        self.vendor, self.check_handler, self.close = source.vendor, source.check_handler, source.close
        self._source, self._watched = source, watched

    def open(self) -> AbstractAsyncContextManager[Any]:
        return self._watched(self._source.open())


class FusedSagas:
    """A store of sagas with a fuse in it; what is not about a point goes straight through."""

    def __init__(self, store: SagaStore, fuse: SagaFuse) -> None:
        self._store, self._fuse = store, fuse
        self._saving: dict[int, Saving] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, worker: str, definitions: Collection[tuple[str, int]], **limits: Any) -> list[SagaRecord]:
        self._fuse.burn("claim asked")
        records = await self._store.claim(worker, definitions, **limits)
        if records:
            self._fuse.burn("claimed")
        return records

    async def save(self, tx: Any, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        saving = Saving(claim.saga_id, turn.instance.version, names_of(turn))
        self._burn(saving, UNSAVED)
        now = await self._store.save(tx, claim, turn, lease_seconds)
        self._burn(saving, SAVED)
        self._saving[id(tx)] = saving
        return now

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._watched(self._store.transaction())

    @property
    def transactions(self) -> WatchedSource:
        return WatchedSource(self._store.transactions, self._watched)

    @asynccontextmanager
    async def _watched(self, context: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        tx = await context.__aenter__()
        try:
            yield tx
        except BaseException:
            self._saving.pop(id(tx), None)
            await context.__aexit__(*sys.exc_info())
            raise
        saving = self._saving.pop(id(tx), None)
        committing = asyncio.ensure_future(context.__aexit__(None, None, None))
        if saving and any(self._fuse.due(f"{name}: {COMMIT_SENT}") for name in saving.names):
            # The first step of the commit writes it to the socket; the answer is never read.
            await asyncio.sleep(0)
            self._fuse.die_at(saving)
        await committing
        if saving:
            self._burn(saving, COMMITTED)

    def _burn(self, saving: Saving, moment: str) -> None:
        for name in saving.names:
            self._fuse.burn_at(f"{name}: {moment}", saving)


class FusedReplies(FusedStore):
    """An inbox that knows which replies were delivered to a saga here."""

    def handling(self, argument: Any) -> None:
        self._fuse.handled.add(str(argument.event_id))


async def _stage(fuse: Fuse, tx: Any, *events: Event) -> list[UUID]:
    staged = await outrider.stage(tx, *events)
    for event in events:
        fuse.burn(f"{event.event_type} staged")
    return staged


async def main(store_url: str, broker_url: str, point: str, count: int, note: Path) -> None:
    """Work until killed, by the fuse or from outside; or until asked to stop."""
    fuse = SagaFuse(point, count, note)
    reply_fuse = Fuse(point.removeprefix(REPLY) if point.startswith(REPLY) else NEVER, count)
    outside = await asyncpg.create_pool(store_url, min_size=1, max_size=4)

    async def connect() -> Any:
        return outside

    async def passing(name: str, run: Any) -> None:
        fuse.burn(name)

    sagas = SagaRegistry(order_saga(connect, passing, call_seconds=CALL_SECONDS, reply_seconds=REPLY_SECONDS))
    store = FusedSagas(await app.open_sagas(store_url), fuse)
    worker = SagaWorker(store, sagas, partial(_stage, fuse), SETTINGS, app.log_observer())
    [routes] = app.saga_inbox(sagas).consumers.values()
    source = FusedSource(app.open_source(broker_url, routes), reply_fuse)
    consumer = Consumer(source, FusedReplies(await app.open_inbox(store_url), reply_fuse), routes, observer=worker)

    def stop() -> None:
        worker.stop()
        consumer.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await asyncio.gather(worker.run(), consumer.run())
    await outside.close()


def run_once(log: Path, *task: Any) -> None:
    """Be a process that works, and says what it does in a file."""
    with log.open("ab", buffering=0) as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    die_with_parent(os.getppid())
    app.configure_logging(json=True, level="WARNING")
    asyncio.run(main(*task))
