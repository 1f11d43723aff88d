"""What a relay holds: a name, lanes at their epochs, and until when it may rely on them.

Whatever is in doubt is given up. A relay that has lost its lanes without knowing would publish beside their new owner;
one that gives up lanes without need has them again after the next heartbeat.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from outrider.clock import Clock
from outrider.errors import OutriderError
from outrider.observer import LanesClaimed, LanesReleased, LeaseLost, Observer
from outrider.outbox import lanes
from outrider.outbox.settings import LEASE_MARGIN, RelaySettings
from outrider.store import Lease, Store

Dropped = Callable[[set[int]], None]
"""Hears of lanes that are the relay's no more."""


@dataclass(slots=True)
class Tenure:
    """A relay's hold on its lanes, under a name that is new with every start and after every loss."""

    store: Store
    settings: RelaySettings
    clock: Clock
    observer: Observer
    chance: random.Random
    dropped: Dropped
    lease: Lease = field(init=False)
    _joining: bool = True
    _trusted_until: float = float("-inf")
    _surrender: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lease = Lease(self._fresh_name())

    async def keep(self) -> bool:
        """Renew the heartbeat, then move towards a fair share of the lanes; tell whether lanes were won."""
        sent = self.clock.boot_seconds()
        pulse = await self.store.beat(self.lease.owner, self.settings.lease_seconds, joining=self._joining)
        if pulse is None:
            self._lose_everything()
            return False
        self._joining = False
        self._trusted_until = sent + self.settings.lease_seconds * LEASE_MARGIN
        change = lanes.rebalance(
            self.lease.epochs, pulse.free_lanes, lanes=self.store.lanes, relays=pulse.relays, chance=self.chance
        )
        self._surrender = set(change.surrender)
        return bool(change.claim) and await self._claim(change.claim)

    async def own_lanes(self, worker: int) -> Lease:
        """Return the worker's lanes, after handing over those that others should have: it has nothing in flight now."""
        mine = self.lease.only(lane for lane in self.lease.epochs if lane % self.settings.workers == worker)
        surplus = self._surrender & mine.epochs.keys()
        if surplus:
            await self.store.release(mine.only(surplus))
            self._drop(mine.only(surplus))
            self.observer.notice(LanesReleased(self.lease.owner, tuple(sorted(surplus))))
        return mine.without(surplus)

    def covers(self, lease: Lease, seconds: float) -> bool:
        """Tell whether what begins now and takes so long ends inside the lease, and it is the one still held."""
        return lease.owner == self.lease.owner and self.clock.boot_seconds() + seconds < self._trusted_until

    def check(self, lease: Lease, found: AbstractSet[int]) -> None:
        """Give up what the store did not find to be ours any more."""
        lost = lease.epochs.keys() - found
        if lost and lease.owner == self.lease.owner:
            self._drop(lease.only(lost))
            self.observer.notice(LeaseLost(self.lease.owner, tuple(sorted(lost))))

    async def forsake(self, lease: Lease) -> None:
        """Give up lanes after a settle of which nobody knows whether, or when, it is written.

        It may still arrive, and it would find this relay the owner. At a new epoch the fence keeps it out.
        """
        try:
            await self.store.release(lease)
        except OutriderError:
            self._lose_everything()
        else:
            self._drop(lease)

    async def _claim(self, wanted: tuple[int, ...]) -> bool:
        try:
            won = await self.store.claim(self.lease.owner, wanted)
        except OutriderError:
            # The lanes may be ours without our knowing, and nobody would work on them while this name lives.
            self._lose_everything()
            raise
        if won.epochs:
            self.lease = Lease(self.lease.owner, {**self.lease.epochs, **won.epochs})
            self.observer.notice(LanesClaimed(self.lease.owner, tuple(won.epochs)))
        return bool(won.epochs)

    def _drop(self, lost: Lease) -> None:
        """Give up lanes, unless they have come back at a later epoch while the loss was on its way to us."""
        gone = {lane for lane, epoch in lost.epochs.items() if self.lease.epochs.get(lane) == epoch}
        gone = gone if lost.owner == self.lease.owner else set()
        self.lease = self.lease.without(gone)
        self._surrender -= gone
        self.dropped(gone)

    def _lose_everything(self) -> None:
        self.observer.notice(LeaseLost(self.lease.owner, tuple(self.lease.epochs)))
        self._drop(self.lease)
        self._trusted_until = float("-inf")
        self.lease = Lease(self._fresh_name())
        self._joining = True

    def _fresh_name(self) -> str:
        return f"relay-{self.chance.getrandbits(48):012x}"
