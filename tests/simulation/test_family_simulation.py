"""Parents and children under faults: a family is done as a whole or undone as a whole."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider.saga.model import Status
from tests.simulation.sagas.families import run_family
from tests.support.sizes import sized

CHUNK = 50
SEEDS = sized(3_000, 300, quick=200)
COUNTED_SEEDS = range(150)
"""Worlds whose reports are counted. Every world checks the guarantees, so these are not run a second time."""


@pytest.mark.parametrize("first", range(COUNTED_SEEDS.stop, SEEDS, CHUNK))
def test_a_family_completes_as_a_whole_or_compensates_as_a_whole_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_family(seed)


def test_the_families_end_in_both_ways_and_are_as_troubled_as_they_claim_to_be() -> None:
    reports = [run_family(seed) for seed in COUNTED_SEEDS]
    ends = Counter(report.status for report in reports)
    assert min(ends[status] for status in (Status.COMPLETED, Status.COMPENSATED)) > 20, ends
    told = "\n".join(line for report in reports for line in report.trace)
    for what in (
        "commit lost its answer",
        "frozen",
        "killed",
        "vanished",
        "starts saga1 version 1",
        "answered by child.done",
        "its child has compensated itself",
        "answered by child.compensated",
        "answered by parent.completed",
        "its parent compensates",
        "is called off",
        "operator call_off",
        "operator retry passed on",
        "deadline exceeded",
        "became failed",
    ):
        assert told.count(what) > 2, what


@pytest.mark.parametrize("seed", [3, 7])
def test_a_seed_of_a_family_replays_exactly(seed: int) -> None:
    assert run_family(seed) == run_family(seed)
