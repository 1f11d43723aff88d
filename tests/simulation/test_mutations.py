"""The simulation would notice: without one of the rules, some world breaks a guarantee."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from outrider.event import OutboxRow, Stream
from outrider.outbox.model import Fetched, Lease
from outrider.stores.memory import MemoryStore
from tests.simulation.world import Options, Unsound, run

SEEDS = 300


def first_unsound(options: Options | None = None) -> Unsound:
    """Return the error of the first world that broke a guarantee."""
    for seed in range(SEEDS):
        try:
            run(seed, options)
        except Unsound as found:
            return found
    pytest.fail(f"{SEEDS} worlds did without this rule, so they prove nothing about it")


def test_without_the_fence_some_world_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "fence", lambda store, lease: set(lease.epochs))
    assert "seed" in str(first_unsound())


def test_without_the_wave_rule_some_world_breaks() -> None:
    """The broker claims to keep a stream's order by itself, so whole runs are sent; it does not."""
    found = first_unsound(Options(ordered=False, claims_order=True))
    assert "delivered" in str(found)


def test_without_the_drain_rule_some_world_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream is let go though events of it still wait."""

    def forget(store: MemoryStore, stream: Stream) -> None:
        store.tables.blocked.pop(stream, None)

    monkeypatch.setattr(MemoryStore, "resolve", forget)
    assert "parked" in str(first_unsound())


def test_with_remembered_positions_some_world_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that starts behind the last position it saw misses what commits late."""
    seen: dict[tuple[int, int], int] = {}
    fetch = MemoryStore.fetch

    async def fetch_ahead(store: MemoryStore, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        fetched = await fetch(store, lease, quotas)

        def fresh(event: OutboxRow) -> bool:
            return event.position >= seen.get((id(store), event.lane), 0)

        kept = [event for event in fetched.events if fresh(event)]
        for event in kept:
            seen[id(store), event.lane] = event.position
        return fetched._replace(events=kept)

    monkeypatch.setattr(MemoryStore, "fetch", fetch_ahead)
    assert "still pending" in str(first_unsound())
