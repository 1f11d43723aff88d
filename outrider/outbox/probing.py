"""Probing destinations that are down, until they are up again."""

from __future__ import annotations

import asyncio

from outrider.broker import Broker
from outrider.clock import Clock
from outrider.observer import BreakerClosed, BreakerOpened, Observer
from outrider.outbox.breaker import Breakers


async def probe(broker: Broker, breakers: Breakers, clock: Clock, observer: Observer, seconds: float) -> float | None:
    """Probe the destinations whose time has come; return the seconds until the next one, None if all are up.

    Each probe may take so many seconds.
    """
    for name, breaker in breakers.waiting():
        if breaker.retry_at is None or breaker.retry_at > clock.boot_seconds():
            continue
        try:
            async with asyncio.timeout(seconds):
                await broker.probe(name)
        except Exception as error:
            # Whatever a probe raises means that the destination is not known to work; the breaker reports it.
            now = clock.boot_seconds()
            breaker.probe_failed(f"{type(error).__name__}: {error}", now)
            observer.notice(BreakerOpened(name, breaker.error, (breaker.retry_at or now) - now))
        else:
            breaker.probe_passed()
            observer.notice(BreakerClosed(name))
    now = clock.boot_seconds()
    return min((max(0.0, (breaker.retry_at or now) - now) for _, breaker in breakers.waiting()), default=None)
