"""Lanes whose outcomes could not be written: the relay repeats the write alone, and publishes nothing from the lanes.

A failed settle leaves confirmed events in the outbox. To fetch the events again would publish them again, so the relay
keeps the outcomes and repeats the write, lane by lane, after a pause that grows with every failure. After the write
the lanes are released: an earlier write without an answer may still arrive, and the fence rejects the write once the
lanes have a new epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from outrider.clock import Clock
from outrider.errors import OutriderError, Transient
from outrider.outbox.lane_ownership import LaneOwnership
from outrider.outbox.model import Lease, Settlements
from outrider.outbox.store import OutboxStore
from outrider.redaction import without_values
from outrider.retry import RetryPolicy
from outrider.telemetry.events import Observer, SettleFailed, SettleRecovered

PAUSES = RetryPolicy(base_seconds=0.1, cap_seconds=30.0, jitter=0)


@dataclass(frozen=True, slots=True)
class UnsettledLane:
    """The outcomes of a lane that are still to be written, and the time of the next attempt."""

    settlements: Settlements
    retry_at: float


@dataclass(slots=True)
class UnsettledLanes:
    """Writes outcomes, and repeats the writes that failed."""

    store: OutboxStore
    ownership: LaneOwnership
    clock: Clock
    observer: Observer
    rng: random.Random
    on_released: Callable[[], None]
    _held: dict[int, UnsettledLane] = field(default_factory=dict)
    # Kept until a write succeeds, also while the lane is released: otherwise the pause would not grow.
    _failures: dict[int, int] = field(default_factory=dict)

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        """Write outcomes; return the number of applied outcomes, 0 if the write failed and will be repeated."""
        try:
            settled = await self.store.settle(lease, settlements) + len(settlements.emptied)
        except OutriderError as error:
            parts = settlements.repeatable_by_lane()
            lanes = {stream.lane for stream in settlements.emptied} | {s.stream.lane for s in settlements.others}
            self._hold(lease, {lane: parts.get(lane, Settlements()) for lane in lanes | parts.keys()}, error)
            return 0
        if self._failures:
            for lane in lease.epochs:
                self._failures.pop(lane, None)
        return settled

    async def repeat(self, lease: Lease, *, at_once: bool = False) -> Lease:
        """Repeat the failed writes that are due, or all `at_once`; return the lanes that may be published from."""
        if not self._held:
            return lease
        now = self.clock.boot_seconds()
        mine = {lane: self._held[lane] for lane in lease.epochs if lane in self._held}
        due = {lane: held.settlements for lane, held in mine.items() if at_once or held.retry_at <= now}
        written: set[int] = set()
        failed: OutriderError | None = None
        for lane in sorted(due):
            try:
                if due[lane]:
                    await self.store.settle(lease.only([lane]), due[lane])
                    self._failures.pop(lane, None)
            except OutriderError as error:
                failed = error
                if isinstance(error, Transient):
                    # The store does not answer for any lane.
                    break
            else:
                written.add(lane)
        if failed:
            self._hold(lease, {lane: part for lane, part in due.items() if lane not in written}, failed)
        if written:
            self.drop(written)
            self.observer.emit(SettleRecovered(lease.owner, tuple(sorted(written))))
            await self.ownership.release_after_failed_settle(lease.only(written))
            self.on_released()
        return lease.without(mine)

    def next_seconds(self, lease: Lease) -> float | None:
        """Return the seconds until the next repetition, None if no lane of the lease waits for one."""
        if not self._held:
            return None
        now = self.clock.boot_seconds()
        return min((max(0.0, self._held[n].retry_at - now) for n in lease.epochs if n in self._held), default=None)

    def drop(self, lanes: Iterable[int]) -> None:
        """Forget the outcomes of lanes that the relay has lost or released: the next owner publishes the events."""
        for lane in lanes:
            self._held.pop(lane, None)

    def _hold(self, lease: Lease, parts: dict[int, Settlements], error: OutriderError) -> None:
        current = self.ownership.lease
        # A lane may have been lost, or claimed again, while the write was waited for.
        owned = {n for n in parts if current.owner == lease.owner and current.epochs.get(n) == lease.epochs[n]}
        failures = max((self._failures.get(lane, 0) for lane in owned), default=0) + 1
        pause = PAUSES.delay_seconds(failures, self.rng)
        retry_at = self.clock.boot_seconds() + pause
        for lane in owned:
            self._failures[lane] = failures
            self._held[lane] = UnsettledLane(parts[lane], retry_at)
        self.observer.emit(SettleFailed(lease.owner, tuple(sorted(owned)), failures, pause, without_values(error)))
