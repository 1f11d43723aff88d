"""Real workers under faults: every saga completes, compensates, or fails visibly for an operator."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider.saga.model import Status
from tests.simulation.sagas.world import run
from tests.support.sizes import sized

CHUNK = 50
SEEDS = sized(10_000, 1_000, quick=650)
COUNTED_SEEDS = range(600)
"""Worlds whose reports are counted. Every world checks the guarantees, so these are not run a second time."""


@pytest.mark.parametrize("first", range(COUNTED_SEEDS.stop, SEEDS, CHUNK))
def test_a_saga_completes_or_compensates_itself_or_asks_for_a_person_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(seed)


@pytest.mark.timeout(600)
def test_the_worlds_end_in_every_way_and_are_as_troubled_as_they_claim_to_be() -> None:
    reports = [run(seed) for seed in COUNTED_SEEDS]
    ends = Counter(report.status for report in reports)
    assert min(ends[status] for status in (Status.COMPLETED, Status.COMPENSATED, Status.FAILED)) > 20, ends
    told = "\n".join(line for report in reports for line in report.trace)
    for what in (
        "commit lost its request",
        "commit lost its answer",
        "claim lost its answer",
        "frozen",
        "killed",
        "vanished",
        "asked to stop",
        "handed over",
        "has another owner",
        "its claim was lost",
        "rolled back",
        "relay is down",
        "still in the outbox",
        "result lost",
        "reply lost",
        "doubled",
        "reply unreadable",
        "reply dropped",
        "it may have happened",
        "unknown whether it happened",
        "the worker was lost",
        "its worker was lost 2 times in a row",
        "rejected after the pivot",
        "compensation failed",
        "answered after all",
        "operator retry",
        "operator compensate",
        "operator mark_done",
        "ignored, because",
        "given up",
        "is down",
        "waits for its service",
        "action skipped",
        "deadline exceeded",
        "[1] action done",
    ):
        assert told.count(what) > 5, what


def test_an_outage_of_services_compensates_no_saga_and_fails_none() -> None:
    reports = {seed: run(seed, calm=True, outage=True) for seed in range(sized(1_000, 60, quick=40))}
    delayed = [seed for seed, report in reports.items() if any("is down" in line for line in report.trace)]
    assert len(delayed) > len(reports) / 4
    # Without the outage, the same saga ends in the same way: completed, or compensated after a rejection.
    assert {seed: reports[seed].status for seed in delayed} == {
        seed: run(seed, calm=True, outage=False).status for seed in delayed
    }


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_a_seed_of_a_saga_replays_exactly(seed: int) -> None:
    assert run(seed) == run(seed)
