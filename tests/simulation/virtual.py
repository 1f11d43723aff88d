"""Virtual time: an event loop that never waits, and a clock that reads it.

Actors can be frozen, like a process that is stopped by a signal: nothing of theirs runs, their timers included, until
they are thawed. What they have sent goes on without them.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from datetime import UTC, datetime, timedelta
from typing import Any

ACTOR: ContextVar[str] = ContextVar("actor", default="")
START = datetime(2030, 1, 1, tzinfo=UTC)


class Stuck(AssertionError):
    """Every actor waits for something that will never happen."""


class _Skipping(selectors.SelectSelector):
    """Where a real loop would wait, this one moves the time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("no actor has anything left to wait for")
        # Even thinking takes time; without that, a wait shorter than a float can tell would never end.
        self.now += max(timeout, 1e-6)
        return []


class _Gated:
    """A callback of an actor, kept back while the actor is frozen."""

    __slots__ = ("args", "callback", "context", "handle", "loop")

    def __init__(self, loop: VirtualLoop, callback: Callable[..., object], args: tuple[Any, ...], context: Context):
        self.loop, self.callback, self.args, self.context = loop, callback, args, context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        held = self.loop.frozen.get(self.context[ACTOR]) if self.loop.frozen else None
        if held is not None:
            held.append(self)
        elif self.handle is None or not self.handle.cancelled():
            self.callback(*self.args)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in which an hour passes in no time."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)
        self.frozen: dict[str, list[_Gated]] = {}

    def time(self) -> float:
        return self._skipping.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        actor = ACTOR.get() if context is None else context.get(ACTOR)
        if not actor:
            return super().call_soon(callback, *args, context=context)
        context = copy_context() if context is None else context
        ordered = _Gated(self, callback, args, context)
        ordered.handle = super().call_soon(ordered, context=context)
        return ordered.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        actor = ACTOR.get() if context is None else context.get(ACTOR)
        if not actor:
            return super().call_at(when, callback, *args, context=context)
        context = copy_context() if context is None else context
        ordered = _Gated(self, callback, args, context)
        ordered.handle = handle = super().call_at(when, ordered, context=context)
        return handle

    def freeze(self, actor: str) -> None:
        """Stop an actor in the middle of whatever it does."""
        self.frozen.setdefault(actor, [])

    def thaw(self, actor: str) -> None:
        """Let an actor go on; what fell due meanwhile happens now, in order."""
        for ordered in self.frozen.pop(actor, ()):
            super().call_soon(ordered, context=ordered.context)


class VirtualClock:
    """The loop's time as a clock. Two clocks may differ in their origin, never in their rate."""

    def __init__(self, loop: VirtualLoop, skew_seconds: float = 0.0) -> None:
        self._loop = loop
        self._skew_seconds = skew_seconds

    def now(self) -> datetime:
        return START + timedelta(seconds=self._loop.time())

    def boot_seconds(self) -> float:
        return self._loop.time() + self._skew_seconds


def as_actor(name: str) -> Context:
    """Return a context whose tasks and timers belong to the named actor."""
    context = copy_context()
    context.run(ACTOR.set, name)
    return context
