"""Which lanes a relay takes, and how much it reads from each."""

from __future__ import annotations

import random

import pytest

from outrider.event import BANDS
from outrider.outbox.lane_ownership import SHARES, quotas, rebalance

LANES = 32
ALL = range(LANES * BANDS)


def keep_in_turn(relays: list[set[int]], rng: random.Random) -> None:
    """Let every relay look at what is free, take its part, and hand over what is too much."""
    for mine in relays:
        owned = set().union(*relays)
        change = rebalance(mine, [lane for lane in ALL if lane not in owned], lanes=LANES, relays=len(relays), rng=rng)
        assert set(change.release) <= mine
        assert not set(change.claim) & owned
        mine |= set(change.claim)
        mine -= set(change.release)


def per_band(mine: set[int]) -> list[int]:
    return [sum(lane // LANES == band for lane in mine) for band in range(BANDS)]


@pytest.mark.parametrize("count", range(1, 8))
def test_relays_that_start_together_come_to_a_fair_share(count: int) -> None:
    relays: list[set[int]] = [set() for _ in range(count)]
    for _ in range(3):
        keep_in_turn(relays, random.Random(count))
    assert sum(map(len, relays)) == len(ALL)
    for mine in relays:
        assert all(have <= -(-LANES // count) for have in per_band(mine))


@pytest.mark.parametrize("count", range(2, 8))
def test_a_newcomer_gets_its_share_from_those_who_have_more(count: int) -> None:
    relays = [set(ALL), *(set[int]() for _ in range(count - 1))]
    for _ in range(3):
        keep_in_turn(relays, random.Random(count))
    assert set().union(*relays) == set(ALL)
    share = -(-LANES // count)
    least = LANES - share * (count - 1)
    assert all(least <= have <= share for mine in relays for have in per_band(mine))


@pytest.mark.parametrize("count", range(1, 8))
def test_a_fair_share_is_not_changed(count: int) -> None:
    relays: list[set[int]] = [set() for _ in range(count)]
    for _ in range(3):
        keep_in_turn(relays, random.Random(count))
    settled = [set(mine) for mine in relays]
    keep_in_turn(relays, random.Random(99))
    assert relays == settled


@pytest.mark.parametrize("count", range(2, 8))
def test_the_lanes_of_a_relay_that_is_gone_find_new_owners(count: int) -> None:
    relays: list[set[int]] = [set() for _ in range(count)]
    for _ in range(3):
        keep_in_turn(relays, random.Random(count))
    survivors = relays[1:]
    for _ in range(3):
        keep_in_turn(survivors, random.Random(count))
    assert set().union(*survivors) == set(ALL)


def test_relays_that_start_together_do_not_all_reach_for_the_same_lanes() -> None:
    choices = {rebalance((), ALL, lanes=LANES, relays=4, rng=random.Random(n)).claim for n in range(10)}
    assert len(choices) == 10


def test_every_band_has_a_share() -> None:
    assert len(SHARES) == BANDS
    assert sum(SHARES) == pytest.approx(1)
    assert list(SHARES) == sorted(SHARES, reverse=True)


def test_nothing_starves_when_everything_is_full() -> None:
    given = quotas(list(ALL), set(ALL), lanes=LANES, batch_max=1000)
    assert set(given) == set(ALL)
    assert min(given.values()) >= 1


def test_the_urgent_band_gets_its_share_when_all_have_a_backlog() -> None:
    hot = [0, LANES, 2 * LANES]
    given = quotas(hot, hot, lanes=LANES, batch_max=1000)
    assert [given[lane] for lane in hot] == [800, 150, 50]


def test_a_band_without_a_backlog_leaves_its_share_to_the_others() -> None:
    given = quotas([0, LANES, 2 * LANES], [LANES, 2 * LANES], lanes=LANES, batch_max=1000)
    assert given[0] == 8
    assert [given[LANES], given[2 * LANES]] == pytest.approx([750, 250], abs=1)


def test_a_single_hot_lane_gets_the_whole_budget() -> None:
    given = quotas(list(ALL), [40], lanes=LANES, batch_max=1000)
    assert given[40] == 1000
    assert all(quota == 8 for lane, quota in given.items() if lane != 40)


def test_hot_lanes_of_a_band_share_equally() -> None:
    given = quotas(list(range(LANES)), [1, 2, 3, 4], lanes=LANES, batch_max=1000)
    assert [given[lane] for lane in (1, 2, 3, 4)] == [250] * 4


def test_lanes_that_were_full_but_are_another_relays_now_take_nothing() -> None:
    assert quotas([1], [1, 2, 3], lanes=LANES, batch_max=1000) == {1: 1000}
