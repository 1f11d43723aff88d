"""Progress through a log: an offset is committed when there is no gap before it."""

from __future__ import annotations

import random

import pytest

from outrider.brokers.offsets import OffsetTracker


def received(*offsets: int) -> tuple[OffsetTracker, list[int]]:
    progress = OffsetTracker()
    return progress, [progress.received(offset) for offset in offsets]


def test_before_anything_is_received_there_is_no_position() -> None:
    progress = OffsetTracker()
    assert progress.position is None
    assert progress.uncommitted is None


def test_nothing_is_committed_before_something_is_done() -> None:
    progress, _ = received(5, 6)
    assert progress.position == 5
    assert progress.uncommitted is None


@pytest.mark.parametrize(
    ("done", "position"),
    [([0], 11), ([1], 10), ([0, 1], 12), ([1, 0], 12), ([2, 1], 10), ([3, 2, 0], 11), ([3, 2, 1, 0], 14)],
)
def test_the_position_is_the_first_that_is_not_done(done: list[int], position: int) -> None:
    progress, numbers = received(10, 11, 12, 13)
    for index in done:
        progress.done(numbers[index])
    assert progress.position == position
    assert len(progress) == len([offset for offset in (10, 11, 12, 13) if offset >= position])


def test_offsets_that_a_log_leaves_out_are_no_gap() -> None:
    progress, (first, second, third) = received(10, 15, 40)
    progress.done(first)
    assert progress.position == 15
    progress.done(third)
    progress.done(second)
    assert progress.position == 41


def test_a_committed_position_is_not_committed_again() -> None:
    progress, (first, second) = received(1, 2)
    uncommitted = [progress.uncommitted]
    progress.done(first)
    uncommitted += [progress.uncommitted, progress.uncommitted]
    progress.committed(2)
    uncommitted += [progress.uncommitted]
    progress.done(second)
    assert [*uncommitted, progress.uncommitted] == [None, 2, 2, None, 3]


def test_done_twice_is_done_once() -> None:
    progress, (first, second) = received(1, 2)
    progress.done(second)
    progress.done(second)
    progress.done(first)
    progress.done(first)
    assert progress.position == 3
    third = progress.received(3)
    assert progress.position == 3
    progress.done(third)
    assert progress.position == 4


def test_a_number_that_was_never_given_is_ignored() -> None:
    progress, _ = received(1)
    progress.done(7)
    progress.done(-1)
    assert progress.position == 1


def test_a_message_at_the_position_of_a_lost_one_must_be_done_itself() -> None:
    progress, (first, second) = received(100, 101)
    again = progress.received(100)
    progress.done(first)
    progress.done(second)
    assert progress.position == 100
    progress.done(again)
    assert progress.position == 101


@pytest.mark.parametrize("seed", range(20))
def test_in_whatever_order_messages_are_done_no_open_message_is_committed(seed: int) -> None:
    rng = random.Random(seed)
    progress = OffsetTracker()
    open_numbers: dict[int, int] = {}
    offset = 0
    for _ in range(500):
        if rng.random() < 0.5:
            offset += rng.randint(1, 3)
            open_numbers[progress.received(offset)] = offset
        elif open_numbers:
            number = rng.choice(list(open_numbers))
            progress.done(number)
            del open_numbers[number]
        expected = min(open_numbers.values(), default=offset + 1 if offset else None)
        assert progress.position == expected
