"""Parents and children under faults: a family is done as a whole or undone as a whole."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from outrider.saga.model import Status
from tests.simulation.sagas.families import run_family
from tests.simulation.sagas.world import Report
from tests.support.sizes import sized

CHUNK = 50
SEEDS = sized(3_000, 300, quick=150)
SHARED_SEEDS = range(150)


@cache
def shared_report(seed: int) -> Report:
    """Run a world once for all tests of this process."""
    return run_family(seed)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_a_family_completes_as_a_whole_or_compensates_as_a_whole_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        shared_report(seed) if seed in SHARED_SEEDS else run_family(seed)


def test_the_families_end_in_both_ways_and_are_as_troubled_as_they_claim_to_be() -> None:
    reports = [shared_report(seed) for seed in SHARED_SEEDS]
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
    assert run_family(seed) == shared_report(seed)
