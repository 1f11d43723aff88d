"""What a consumer does now and then: drain what another process left, tell of gaps, remove what is old."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import datetime

from outrider.delivery import InboxStream
from outrider.errors import OutriderError
from outrider.inbox.handling import Handling
from outrider.inbox.router import Routes
from outrider.inbox.settings import Gate
from outrider.inbox_store import InboxStore
from outrider.observer import GapOverdue, InboxUpkeepDone, Observer

PRUNE_SECONDS = 600.0
STREAMS_MAX = 100


@dataclass(slots=True)
class Upkeep:
    """The duties of one consumer. Every process does them; the store lets one of them have each stream."""

    store: InboxStore
    routes: Routes
    handling: Handling
    observer: Observer
    told: dict[InboxStream, datetime] = field(default_factory=dict)
    prune_at: float = 0.0

    async def run(self, stopping: asyncio.Event) -> None:
        """Do what is due, until asked to stop."""
        while not stopping.is_set():
            try:
                await self.tend()
            except OutriderError as error:
                self.handling.trouble(str(error))
            try:
                async with asyncio.timeout(self.routes.settings.tend_seconds):
                    await stopping.wait()
            except TimeoutError:
                continue

    async def tend(self) -> None:
        """Do what is due, once."""
        for cause in self.routes.settings.drains:
            for stream in await self.store.draining(self.routes.consumer, STREAMS_MAX, cause=cause):
                self.handling.drain(stream)
        if self.routes.settings.gate is Gate.STRICT:
            await self._tell_of_gaps()
        if time.monotonic() >= self.prune_at:
            await self._prune()
            self.prune_at = time.monotonic() + PRUNE_SECONDS

    async def _tell_of_gaps(self) -> None:
        """Tell of each gap once; a stream that waits anew is told of anew."""
        seconds = self.routes.settings.gap_timeout_seconds
        found = await self.store.overdue(self.routes.consumer, seconds, STREAMS_MAX)
        for stream, seen, waiting, since in found:
            if self.told.get(stream) != since:
                self.observer.notice(GapOverdue(self.routes.consumer, stream.topic, stream.key, seen, waiting))
        self.told = {gap.stream: gap.since for gap in found}

    async def _prune(self) -> None:
        settings = self.routes.settings
        pruned = await self.store.prune(
            self.routes.consumer, receipt_days=settings.receipt_days, dead_letter_days=settings.dead_letter_days
        )
        barriers = 0 if settings.barrier_days is None else await self.store.prune_barriers(settings.barrier_days)
        if any(pruned) or barriers:
            self.observer.notice(InboxUpkeepDone(self.routes.consumer, *pruned, barriers))
