"""Every guarantee holds in every world: whatever is frozen, killed, delayed, lost or nacked, and in whatever order."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.outbox import batch, publisher
from tests.simulation.world import Options, run
from tests.support.sizes import sized

CHUNK = 50
SEEDS = sized(2_000, 500, quick=200)
COUNTED_SEEDS = range(150)
"""Worlds whose failures are counted. Every world checks the guarantees, so these are not run a second time."""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("first", range(COUNTED_SEEDS.stop, SEEDS, CHUNK))
def test_nothing_is_lost_invented_or_reordered_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(seed)


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_nothing_is_lost_or_reordered_when_passes_are_short_and_every_backlog_is_hot(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(publisher, "PASS_SECONDS", 0.001)
    monkeypatch.setattr(batch, "HOT_EVENTS_MIN", 1)
    defer_hot = batch.Batch.defer_hot
    monkeypatch.setattr(batch.Batch, "defer_hot", lambda found, _: defer_hot(found, range(100)))
    for seed in range(first, first + 50):
        run(seed)


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_a_clean_restart_delivers_nothing_twice(first: int) -> None:
    for seed in range(first, first + 50):
        report = run(seed, Options(faults=False))
        assert report.duplicates == 0, f"seed {seed} delivered {report.duplicates} messages twice"


def test_the_worlds_have_the_failures_that_they_claim() -> None:
    verbs = [step.verb for seed in COUNTED_SEEDS for step in run(seed).trace]
    for verb in ("frozen", "killed", "vanished", "asked to stop", "down", "mute", "rollback", "savepoint rolled back"):
        assert verbs.count(verb) > 20, verb
    for verb in (
        "dead-letter block",
        "dead-letter skip",
        "replay",
        "discard",
        "dead-letter",
        "settle lost its answer",
        "claim",
    ):
        assert verbs.count(verb) > 5, verb


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_a_seed_replays_exactly(seed: int) -> None:
    assert run(seed).trace == run(seed).trace


def test_a_seed_replays_exactly_in_another_process() -> None:
    """Sets of text are ordered differently in every process, so nothing may depend on their order."""
    code = "import tests.simulation.test_simulation as t; print(t.fingerprint(range(10)))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        output = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        assert output.stdout.strip() == fingerprint(range(10))


def fingerprint(seeds: range) -> str:
    """Return a digest of everything that happened in some worlds."""
    return hashlib.sha256(
        "\n".join(map(str, (step for seed in seeds for step in run(seed).trace))).encode()
    ).hexdigest()
