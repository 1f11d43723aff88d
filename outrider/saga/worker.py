"""The saga worker: claims sagas that are due or have mail, and drives each of them in a task of its own.

Each duty is a step that can be called by itself (`work`, `renew`, `tend`); `run` calls them in loops. What a crash
leaves behind is journaled intents; whoever claims the saga after the lease begins them again, with the same keys.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from outrider.clock import Clock, SystemClock
from outrider.errors import OutriderError, Transient
from outrider.observer import (
    Fact,
    Handled,
    Observer,
    Observers,
    SagaDropped,
    SagaUpkeepDone,
    SagaWorkerStarted,
    SagaWorkerStopped,
)
from outrider.saga.clerk import Stage
from outrider.saga.driving import Drive, Means
from outrider.saga.faults import RAISED, described
from outrider.saga.fitting import check_locals
from outrider.saga.renewing import Renewing
from outrider.saga.sagas import Sagas
from outrider.saga.settings import SagaSettings
from outrider.saga.strays import Strays
from outrider.saga.trouble import Spoilt, Trouble
from outrider.saga.waiting import wait_for
from outrider.saga_store import Record, SagaStore

LOST = "its claim was lost: another worker has it, or will have it"


class SagaWorker:
    """One worker, with a fresh name per start.

    Give it a store, sagas, and what stages their events in the store's transactions::

        worker = SagaWorker(await open_sagas(url), Sagas(order, refund), outrider.stage)
        await worker.run()
    """

    def __init__(
        self,
        store: SagaStore,
        sagas: Sagas,
        stage: Stage,
        settings: SagaSettings | None = None,
        observer: Observer | None = None,
        *,
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.store, self.sagas, self.settings = store, Sagas.of(sagas), settings or SagaSettings()
        self.observer, self.clock, self.chance = (
            observer or Observers(),
            clock or SystemClock(),
            chance or random.Random(),
        )
        check_locals(store, self.sagas)
        self.name = f"saga-worker-{self.chance.getrandbits(48):012x}"
        self._trouble = Trouble(self.name, self.observer, self.chance)
        self._drives: dict[UUID, Drive] = {}
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._renewing = Renewing(store, self.settings, self.clock, self._trouble, self._drives, self._lost)
        self._means = Means(
            store,
            stage,
            self.settings,
            self.observer,
            self.clock,
            self.chance,
            self._trouble,
            Strays(self.observer),
            self._renewing.ahead,
        )
        self._spoilt = Spoilt()
        self._due_at: float | None = None
        self._stopping, self._wake = asyncio.Event(), asyncio.Event()

    @property
    def busy(self) -> int:
        """Return how many sagas it has."""
        return len(self._drives)

    @property
    def strays(self) -> int:
        """Return how many calls go on that were cancelled; a process with such calls may have to be ended by force."""
        return len(self._means.strays.tasks)

    def stop(self) -> None:
        """Ask for a clean stop: no new claims, calls under way may finish, and everything is given back."""
        self._stopping.set()
        self.wake()

    def wake(self) -> None:
        """Look for sagas now. Safe to call from the event loop at any time."""
        self._wake.set()

    def notice(self, fact: Fact) -> None:
        """Look for sagas when a consumer has handled something, as it may have been mail.

        So a worker is an observer, for the consumers beside it::

            Consumer(source, store, routes, observer=Observers([log_observer(), worker]))
        """
        if isinstance(fact, Handled):
            self.wake()

    async def run(self) -> None:
        """Run sagas until `stop` is called. When cancelled, it leaves everything as a crash would."""
        definitions = tuple(f"{saga_type} v{version}" for saga_type, version in sorted(self.sagas.versions))
        self.observer.notice(SagaWorkerStarted(self.name, definitions))
        try:
            async with self.store.wakeups(self.wake), asyncio.TaskGroup() as tasks:
                duties = [
                    tasks.create_task(self._repeat(self.renew, self.settings.renew_seconds)),
                    tasks.create_task(self._repeat(self._renewing.moved_back, 0.0)),
                    tasks.create_task(self._repeat(self.tend, self.settings.upkeep_seconds)),
                ]
                await self._claiming()
                await self._give_back()
                for duty in duties:
                    duty.cancel()
        finally:
            await self._forsake()
        self.observer.notice(SagaWorkerStopped(self.name))

    async def work(self) -> int:
        """Claim what there is room for, and begin to drive it; return how much that was."""
        room = self.settings.concurrency - len(self._drives)
        if room <= 0:
            return 0
        if self._due_at is not None and self._due_at <= asyncio.get_running_loop().time():
            self._due_at = None
        lease_seconds = self.settings.lease_seconds
        records = await self.store.claim(self.name, self.sagas.versions, limit=room, lease_seconds=lease_seconds)
        for record in records:
            self._begin(record)
        return len(records)

    async def rest(self) -> None:
        """Wait until it has no saga any more: each has ended, or waits for somebody else or for time to pass."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def renew(self) -> None:
        """Renew all claims; drop what is not held any more."""
        await self._renewing.renew()

    async def tend(self) -> None:
        """Remove what is old."""
        settings = self.settings
        pruned = await self.store.prune(
            saga_days=settings.saga_days, audit_days=settings.audit_days, barrier_days=settings.barrier_days
        )
        if any(pruned):
            self.observer.notice(SagaUpkeepDone(*pruned))

    def _begin(self, record: Record) -> None:
        instance = record.instance
        saga = self.sagas.find(instance.saga_type, instance.definition_version)
        assert saga is not None, "only what is here is claimed"
        if (known := self._drives.get(instance.saga_id)) and known.adopt(record):
            return
        self._lose(instance.saga_id)
        drive = Drive(self._means, saga, record, stop=self._spoilt.verdict(instance.saga_id))
        self._drives[instance.saga_id] = drive
        self._tasks[instance.saga_id] = asyncio.create_task(self._drive(drive), name=f"saga-{instance.saga_id}")

    def _lost(self, drive: Drive) -> None:
        """Drop a saga whose claim was not renewed, unless it is another's by now."""
        if self._drives.get(drive.claim.saga_id) is drive:
            self._tasks[drive.claim.saga_id].cancel()

    def _lose(self, saga_id: UUID) -> None:
        """Forget a former claim of the same saga, which must have ended unnoticed."""
        self._drives.pop(saga_id, None)
        if task := self._tasks.pop(saga_id, None):
            task.cancel()

    async def _drive(self, drive: Drive) -> None:
        saga_id = drive.claim.saga_id
        try:
            with self._told(saga_id):
                await drive.run()
        finally:
            if self._drives.get(saga_id) is drive:
                del self._drives[saga_id], self._tasks[saga_id]
                self._released(drive)

    @contextmanager
    def _told(self, saga_id: UUID) -> Iterator[None]:
        """Tell why a saga was dropped, whatever it was. It comes again when its lease is over, so nothing spins."""
        try:
            yield
        except asyncio.CancelledError:
            self.observer.notice(SagaDropped(self.name, saga_id, LOST))
            raise
        except RAISED as error:
            if not isinstance(error, Transient):
                self._spoilt.met(saga_id, described(error))
            self.observer.notice(SagaDropped(self.name, saga_id, described(error)))
        else:
            self._spoilt.over(saga_id)

    def _released(self, drive: Drive) -> None:
        """Remember when the next one is due, and look at once if there was no room before."""
        if drive.wake_seconds is not None:
            due_at = asyncio.get_running_loop().time() + drive.wake_seconds
            self._due_at = due_at if self._due_at is None else min(self._due_at, due_at)
        if drive.wake_seconds is not None or len(self._drives) + 1 >= self.settings.concurrency:
            self.wake()

    async def _claiming(self) -> None:
        """Claim until asked to stop: at once when there is a hint, else more and more slowly."""
        idle_seconds = self.settings.poll_seconds_min
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                found = await self.work()
            except OutriderError as error:
                # Not only what is known to pass: a worker that ends over one bad answer helps nobody. It is told.
                await wait_for(self._stopping, self._trouble.met(str(error)))
                continue
            self._trouble.over()
            if found:
                idle_seconds = self.settings.poll_seconds_min
                continue
            woken = await wait_for(self._wake, self._idle(idle_seconds))
            lowest, highest = self.settings.poll_seconds_min, self.settings.poll_seconds_max
            idle_seconds = lowest if woken else min(idle_seconds * 2, highest)

    def _idle(self, seconds: float) -> float:
        if self._due_at is None:
            return seconds
        return min(seconds, max(self._due_at - asyncio.get_running_loop().time(), 0.001))

    async def _repeat(self, duty: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Repeat a duty. After trouble with the store it is tried again soon; the lease decides what that costs."""
        pause = min(seconds, self.settings.renew_seconds)
        while True:
            await asyncio.sleep(pause)
            try:
                await duty()
            except OutriderError as error:
                pause = min(seconds, self._trouble.met(str(error)))
            else:
                self._trouble.over()
                pause = seconds

    async def _give_back(self) -> None:
        """Let calls under way finish, as long as there is time; then give everything back."""
        for drive in self._drives.values():
            drive.stop()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=self.settings.stop_seconds)
        for drive in self._drives.values():
            drive.abandon()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=self.settings.lease_seconds)

    async def _forsake(self) -> None:
        """Let go of everything at once, without a word to the store."""
        tasks: list[asyncio.Task[Any]] = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
