"""Every saga completes, undoes itself or asks for a person, whoever is lost, refuses, raises, or is late."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider.saga_store import Status
from tests.simulation.sagas.world import run

CHUNK = 100
SEEDS = 600


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_a_saga_completes_or_undoes_itself_or_asks_for_a_person_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(seed)


def test_the_worlds_end_in_every_way_and_are_as_troubled_as_they_claim_to_be() -> None:
    reports = [run(seed) for seed in range(SEEDS)]
    ends = Counter(report.status for report in reports)
    assert min(ends[status] for status in (Status.COMPLETED, Status.COMPENSATED, Status.FAILED)) > 20, ends
    told = "\n".join(line for report in reports for line in report.trace)
    for what in (
        "lost before saving",
        "lost after saving",
        "a worker is lost",
        "asked to stop",
        "handed over",
        "fenced",
        "result lost",
        "reply lost",
        "doubled",
        "reply unreadable",
        "reply dropped",
        "it may have happened",
        "unknown whether it happened",
        "the worker was lost",
        "refused after the pivot",
        "compensation failed",
        "order retry",
        "order compensate",
        "order resume",
        "ignored, because",
        "given up",
    ):
        assert told.count(what) > 5, what


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_a_seed_of_a_saga_replays_exactly(seed: int) -> None:
    assert run(seed) == run(seed)
