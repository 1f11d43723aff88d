"""Calls and local functions that are cancelled and do not end: nobody waits for them, and nobody forgets them.

A task cannot be ended against its will. So what comes next begins beside it, and it is told; the idempotency key is
what keeps the two one. A step that leaves too many of them behind is not called any more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from outrider.observer import Observer, SagaCallStray
from outrider.saga.news import Call, Local
from outrider.saga_store import Instance

CANCEL_SECONDS = 1.0
"""How long a call that is cancelled may take to end before it counts as a stray."""

STRAYS_MAX = 100
"""How many a step may leave behind."""

Place = tuple[str, str]


@dataclass(slots=True)
class Strays:
    """The strays of a worker."""

    observer: Observer
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    by_step: Counter[Place] = field(default_factory=Counter)

    def objection(self, instance: Instance, move: Call | Local) -> str | None:
        """Say why a step must not be called again, if it has left so many behind."""
        if (count := self.by_step[instance.saga_type, move.step]) < STRAYS_MAX:
            return None
        return (
            f"{count} calls of it ignore that they were cancelled and are still running, so that it is not called any "
            "more; let it end when it is cancelled, restart the worker, and order a retry"
        )

    async def within(
        self, task: asyncio.Task[Any], seconds: float | None, instance: Instance, move: Call | Local
    ) -> bool:
        """Wait for a call, and tell whether it ended in time. When that is over, or the waiting, it is cancelled."""
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
        except asyncio.CancelledError:
            await self._let_go(task, instance, move)
            raise
        if not done:
            await self._let_go(task, instance, move)
        return bool(done)

    async def _let_go(self, task: asyncio.Task[Any], instance: Instance, move: Call | Local) -> None:
        task.cancel()
        try:
            await asyncio.wait([task], timeout=CANCEL_SECONDS)
        finally:
            if not task.done():
                self._keep(task, instance, move)

    def _keep(self, task: asyncio.Task[Any], instance: Instance, move: Call | Local) -> None:
        place = instance.saga_type, move.step
        self.tasks.add(task)
        self.by_step[place] += 1

        def gone(ended: asyncio.Task[Any]) -> None:
            self.tasks.discard(ended)
            self.by_step[place] -= 1

        task.add_done_callback(gone)
        saga = instance.saga_id, instance.saga_type
        self.observer.notice(SagaCallStray(*saga, move.step, move.phase, move.attempt, len(self.tasks)))
