"""Renewing the claims of a worker, and in time where one local step keeps everything else waiting.

On a store that lends one transaction at a time no claim can be renewed while a local step has it. Those of calls are
then renewed for longer before it begins: a call whose claim ended meanwhile would be made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import UUID

from outrider.clock import Clock
from outrider.errors import Transient
from outrider.saga.driving import Drive
from outrider.saga.settings import LEASE_MARGIN, SagaSettings
from outrider.saga.trouble import Trouble
from outrider.saga_store import SagaStore

LONGER_SECONDS = 0.1
"""How long claims stay renewed for longer, as several local steps may follow each other."""


@dataclass(slots=True)
class Renewing:
    """Renews what a worker drives; `lost` is told of a drive whose claim is not held any more."""

    store: SagaStore
    settings: SagaSettings
    clock: Clock
    trouble: Trouble
    drives: Mapping[UUID, Drive]
    lost: Callable[[Drive], None]
    _longer: asyncio.Event = field(default_factory=asyncio.Event)
    _keeping_busy: list[float] = field(default_factory=list)

    async def renew(self) -> None:
        """Renew all claims; those of calls for longer, while a local step may keep everything waiting."""
        drives, longer_seconds = list(self.drives.values()), max(self._keeping_busy, default=0.0)
        calls = [drive for drive in drives if drive.calling and longer_seconds]
        await self._renew(calls, self.settings.lease_seconds + longer_seconds)
        await self._renew([drive for drive in drives if drive not in calls], self.settings.lease_seconds)

    @asynccontextmanager
    async def ahead(self, seconds: float) -> AsyncIterator[None]:
        """Renew before a local step, where one keeps everything waiting and a call's claim would end meanwhile."""
        if not self.store.one_at_a_time:
            yield
            return
        until = self.clock.boot_seconds() + seconds
        calling = [drive for drive in self.drives.values() if drive.calling]
        self._keeping_busy.append(seconds)
        try:
            if any(drive.claimed_until < until for drive in calling):
                self._longer.set()
                try:
                    await self._renew(calling, self.settings.lease_seconds + max(self._keeping_busy))
                except Transient as error:
                    self.trouble.met(str(error))
            yield
        finally:
            self._keeping_busy.remove(seconds)

    async def moved_back(self) -> None:
        """Renew as usual after claims were renewed for longer, or they would outlast a worker that dies by as much."""
        await self._longer.wait()
        await asyncio.sleep(LONGER_SECONDS)
        if not self._keeping_busy:
            self._longer.clear()
            await self.renew()

    async def _renew(self, drives: Sequence[Drive], seconds: float) -> None:
        """Renew claims, in one statement."""
        claims = {drive: drive.claim for drive in drives}
        if not claims:
            return
        asked_at = self.clock.boot_seconds()
        held = await self.store.renew(list(claims.values()), seconds)
        for drive, claim in claims.items():
            if claim.saga_id in held:
                drive.claimed_until = asked_at + seconds * LEASE_MARGIN
            elif drive.claim == claim and not drive.in_turn:
                # One that is in a turn may just have been given back; if not, its save finds out by itself.
                self.lost(drive)
