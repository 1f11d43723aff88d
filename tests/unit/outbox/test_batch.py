"""Which events may go out together, and which must wait."""

from __future__ import annotations

import pytest

from outrider.brokers.base import CONFIRMED, Nacked, PublishResult, Unknown
from outrider.event import OutboxRow, Readiness, default_topic, resolve_topic
from outrider.outbox.batch import WAVE_BYTES_MAX, Batch, RunResult, StreamRun, split_by_size, split_by_stream
from outrider.outbox.circuit_breaker import CircuitBreakers
from outrider.outbox.model import PARK, BlockReason, Defer, DueStream, Outcome, Retry, Settlement, State
from tests.support.outbox_rows import staged, stream

RETRY = Retry(1.0, {})
ELSEWHERE = stream("elsewhere")


def grouped(*events: OutboxRow) -> Batch:
    """Plan a batch whose events are grouped by stream, because some other stream is blocked."""
    return Batch.plan(events, (), {ELSEWHERE})


def positions(batch: Batch, limit: int = 100, *, ordered: bool = False) -> list[list[int]]:
    wave = batch.next_wave(limit, ordered=ordered)
    return [[event.position for event in run.events] for run in (wave.runs or ())] if wave else []


def retry(event: OutboxRow, result: object) -> Outcome:
    return RETRY


def settled(batch: Batch) -> list[Settlement]:
    return batch.settlements.outcomes()


def test_a_wave_carries_at_most_one_event_per_stream() -> None:
    batch = grouped(staged(1, "A"), staged(2, "A"), staged(3, "B"), staged(4, "A"))
    assert positions(batch) == [[1], [3]]
    assert positions(batch) == [[2]]
    assert positions(batch) == [[4]]
    assert batch.next_wave(100, ordered=False) is None


def test_a_broker_that_keeps_order_gets_whole_runs() -> None:
    batch = grouped(staged(1, "A"), staged(2, "A"), staged(3, "B"), staged(4, "A"))
    assert positions(batch, ordered=True) == [[1, 2, 4], [3]]
    assert batch.next_wave(100, ordered=True) is None


def test_a_wave_stays_within_its_limit_and_the_rest_keeps_its_order() -> None:
    batch = grouped(*(staged(n, "A") for n in range(1, 6)), staged(6, "B"))
    assert positions(batch, 3, ordered=True) == [[1, 2, 3]]
    assert positions(batch, 3, ordered=True) == [[4, 5], [6]]


def test_an_unordered_wave_stays_within_its_limit() -> None:
    batch = grouped(*(staged(n, f"key-{n}") for n in range(1, 6)))
    assert positions(batch, 2) == [[1], [2]]
    assert positions(batch, 2) == [[3], [4]]
    assert positions(batch, 2) == [[5]]


def test_unsorted_events_are_split_into_the_first_of_every_stream_then_the_second() -> None:
    events = [staged(1, "A"), staged(2, "A"), staged(3, "B"), staged(4, "A", lane=7), staged(5, "B"), staged(6, "A")]
    assert [[event.position for event in wave] for wave in split_by_stream(events)] == [[1, 3, 4], [2, 5], [6]]


@pytest.mark.parametrize(("ordered", "waves"), [(True, [[1, 2, 3]]), (False, [[1, 3], [2]])])
def test_unsorted_events_that_are_all_confirmed_are_never_grouped_by_stream(
    ordered: bool, waves: list[list[int]]
) -> None:
    events = [staged(1, "A"), staged(2, "A"), staged(3, "B")]
    batch, sent = Batch.plan(events), []
    while wave := batch.next_wave(100, ordered=ordered, breakers=CircuitBreakers()):
        assert wave.runs is None
        sent.append([event.position for event in wave.events])
        batch.confirm(wave)
    assert sent == waves
    assert batch.settlements.only_confirmed
    assert batch.confirmed == len(batch.settlements.confirmed) == 3


def test_fresh_events_are_grouped_by_stream_once_a_destination_has_failed() -> None:
    batch, breakers = Batch.plan([staged(1, "A"), staged(2, "A"), staged(3, "B")]), CircuitBreakers()
    first = batch.next_wave(1, ordered=True, breakers=breakers)
    assert first is not None
    batch.confirm(first)
    breakers.fail("orders", [staged(9, "B")], "closed", 0.0, isolated=False)
    wave = batch.next_wave(100, ordered=True, breakers=breakers)
    assert wave is not None
    assert wave.runs == [StreamRun(stream("A"), [staged(2, "A")]), StreamRun(stream("B"), [staged(3, "B")])]
    assert wave.has_suspects


def test_a_failure_among_fresh_events_stops_its_own_stream_only() -> None:
    events = [staged(1, "A"), staged(2, "B"), staged(3, "A"), staged(4, "B"), staged(5, "A")]
    batch = Batch.plan(events)
    wave = batch.next_wave(4, ordered=True)
    assert wave is not None
    results: list[PublishResult] = [CONFIRMED, CONFIRMED, Nacked("no"), CONFIRMED]
    [first, second] = batch.record(wave, results, retry)
    assert first == RunResult(stream("A"), events[0:1], events[2:3], Nacked("no"), RETRY)
    assert second == RunResult(stream("B"), [events[1], events[3]])
    assert settled(batch) == [
        *(Settlement(events[index], events[index].stream, CONFIRMED) for index in (0, 1, 3)),
        Settlement(events[2], stream("A"), RETRY),
        Settlement(events[4], stream("A"), PARK),
    ]
    assert batch.next_wave(100, ordered=True) is None


def test_portions_keep_the_order_and_stay_within_events_and_bytes() -> None:
    third = b"x" * (WAVE_BYTES_MAX // 3)
    events = [staged(n, "A", payload=third if n > 4 else b"1") for n in range(1, 10)]
    split = [[event.position for event in portion] for portion in split_by_size(events, 4)]
    assert split == [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
    assert split_by_size(events[:4], 4) == [events[:4]]
    huge = staged(1, "A", payload=b"x" * (WAVE_BYTES_MAX + 1))
    assert split_by_size([huge, huge], 4) == [[huge], [huge]]


def test_a_wave_carries_no_more_bytes_than_can_be_confirmed_in_time() -> None:
    third = b"x" * (WAVE_BYTES_MAX // 3)
    for ordered in (False, True):
        batch = grouped(*(staged(n, f"key-{n}", payload=third) for n in range(1, 6)))
        assert positions(batch, ordered=ordered) == [[1], [2], [3], [4]]
        assert positions(batch, ordered=ordered) == [[5]]


def test_a_run_is_cut_where_its_bytes_are_too_many() -> None:
    third = b"x" * (WAVE_BYTES_MAX // 3)
    batch = grouped(*(staged(n, "A", payload=third) for n in range(1, 6)), staged(6, "B"))
    assert positions(batch, ordered=True) == [[1, 2, 3], [6]]
    assert positions(batch, ordered=True) == [[4, 5]]


def test_an_event_larger_than_a_wave_goes_all_the_same() -> None:
    huge = b"x" * (WAVE_BYTES_MAX + 1)
    for ordered in (False, True):
        batch = grouped(staged(1, "A", payload=huge), staged(2, "A"), staged(3, "B"))
        assert positions(batch, ordered=ordered) == [[1]]
        assert positions(batch, ordered=ordered)[0][0] == 2


def test_an_event_that_must_be_isolated_is_a_run_of_its_own() -> None:
    batch, breakers = grouped(*(staged(n, "A", suspect=n == 3) for n in range(1, 6))), CircuitBreakers()
    breakers.fail("", [], "closed", 0.0, isolated=False)
    runs: list[list[int]] = []
    while wave := batch.next_wave(100, ordered=True, breakers=breakers):
        runs += [[event.position for event in run.events] for run in wave.runs or ()]
    assert runs == [[1, 2], [3], [4, 5]]


def test_events_behind_an_event_that_stopped_are_parked() -> None:
    head, second, third = staged(1), staged(2), staged(3)
    batch = grouped(head, second, third, staged(4, "B"))
    wave = batch.next_wave(100, ordered=False)
    assert wave is not None
    batch.record(wave, [Nacked("no"), CONFIRMED], retry)
    assert batch.settlements.others == [
        Settlement(head, stream(), RETRY),
        Settlement(second, stream(), PARK),
        Settlement(third, stream(), PARK),
    ]
    assert batch.next_wave(100, ordered=False) is None


def test_a_parked_event_needs_no_second_write() -> None:
    head, parked = staged(1, state=State.FAILED), staged(2, state=State.PARKED)
    batch = Batch.plan((), [DueStream(stream(), BlockReason.DRAINING, [head, parked])], {stream()})
    wave = batch.next_wave(1, ordered=False)
    assert wave is not None
    batch.record(wave, [Nacked("no")], retry)
    assert settled(batch) == [Settlement(head, stream(), RETRY)]


def test_a_stream_of_which_nothing_is_known_is_left_as_it_is() -> None:
    batch = grouped(staged(1), staged(2))
    wave = batch.next_wave(100, ordered=False)
    assert wave is not None
    [run] = batch.record(wave, [Unknown("closed")], retry)
    assert (run.unconfirmed, run.outcome) == ([staged(1)], None)
    assert batch.next_wave(100, ordered=False) is None
    assert not batch.settlements


def test_confirmed_events_are_counted_and_settled_in_order() -> None:
    events = [staged(1), staged(2)]
    batch = grouped(*events)
    wave = batch.next_wave(100, ordered=True)
    assert wave is not None
    batch.confirm(wave)
    assert batch.confirmed == 2
    assert batch.settlements.confirmed == events


def test_a_confirmed_event_of_a_blocked_stream_is_settled_with_its_stream() -> None:
    held = staged(1, state=State.PARKED)
    batch = Batch.plan((), [DueStream(stream(), BlockReason.DRAINING, [held])], {stream()})
    wave = batch.next_wave(100, ordered=True)
    assert wave is not None
    batch.confirm(wave)
    assert not batch.settlements.confirmed
    assert batch.settlements.others == [Settlement(held, stream(), CONFIRMED)]


def test_an_early_event_is_deferred_and_blocks_its_stream() -> None:
    early, later = staged(1, readiness=Readiness.EARLY), staged(2)
    batch = Batch.plan([early, later])
    assert settled(batch) == [Settlement(early, stream(), Defer()), Settlement(later, stream(), PARK)]
    assert batch.next_wave(100, ordered=False) is None


def test_an_early_event_does_not_block_events_before_it() -> None:
    batch = Batch.plan([staged(1), staged(2, readiness=Readiness.EARLY), staged(3)])
    assert positions(batch) == [[1]]
    assert not batch.settlements
    assert batch.next_wave(100, ordered=False) is None


def test_an_event_that_its_writer_claims_stops_its_stream_for_this_pass_only() -> None:
    batch = Batch.plan([staged(1), staged(2, readiness=Readiness.OPTIMISTIC), staged(3), staged(4, "B")])
    assert positions(batch) == [[1], [4]]
    assert not batch.settlements
    assert batch.next_wave(100, ordered=False) is None


def test_new_events_of_a_blocked_stream_are_parked() -> None:
    new = staged(5)
    batch = Batch.plan([new, staged(6, "B")], (), {stream()})
    assert settled(batch) == [Settlement(new, stream(), PARK)]
    assert positions(batch) == [[6]]


def test_an_event_that_its_writer_claims_is_not_parked_even_in_a_blocked_stream() -> None:
    batch = Batch.plan([staged(5, readiness=Readiness.OPTIMISTIC), staged(6)], (), {stream()})
    assert not batch.settlements
    assert batch.next_wave(100, ordered=False) is None


def test_a_due_head_goes_out_while_new_events_park_behind_it() -> None:
    head, new = staged(1, state=State.FAILED), staged(9)
    batch = Batch.plan([new], [DueStream(stream(), BlockReason.FAILED, [head])], {stream()})
    assert settled(batch) == [Settlement(new, stream(), PARK)]
    assert positions(batch) == [[1]]


def test_a_draining_stream_without_parked_events_is_emptied() -> None:
    batch = Batch.plan((), [DueStream(stream(), BlockReason.DRAINING, [])])
    assert batch.settlements.emptied == [stream()]


def test_a_parked_event_with_a_time_of_its_own_defers_its_stream_again() -> None:
    early = staged(1, state=State.PARKED, readiness=Readiness.EARLY)
    batch = Batch.plan((), [DueStream(stream(), BlockReason.DRAINING, [early, staged(2)])])
    assert settled(batch) == [Settlement(early, stream(), Defer())]
    assert batch.next_wave(100, ordered=False) is None


def test_a_run_that_drains_ends_before_an_event_with_a_time_of_its_own() -> None:
    held = [staged(1, state=State.PARKED), staged(2, state=State.PARKED, readiness=Readiness.EARLY), staged(3)]
    batch = Batch.plan((), [DueStream(stream(), BlockReason.DRAINING, held)])
    assert positions(batch, ordered=True) == [[1]]
    assert not batch.settlements
    assert batch.next_wave(100, ordered=True) is None


def test_the_same_key_in_another_topic_or_lane_is_another_stream() -> None:
    batch = grouped(staged(1), staged(2, topic="mails"), staged(3, lane=7))
    assert positions(batch) == [[1], [2], [3]]


def test_a_row_without_a_topic_gets_one_by_the_rule() -> None:
    assert resolve_topic(staged(1, topic=None), default_topic).topic == "events.order.placed"
    assert resolve_topic(staged(1, topic=None, routing_key="to.me"), default_topic).topic == "to.me"
    assert resolve_topic(staged(1), default_topic).topic == "orders"


def test_a_hot_stream_of_a_full_lane_is_deferred_and_parked_and_other_streams_stay() -> None:
    batch = Batch.plan([staged(n, "A") for n in range(1, 21)] + [staged(21, "B")])
    wave = batch.next_wave(100, ordered=False)
    assert wave is not None
    batch.confirm(wave)
    lane = staged(1, "A").lane
    batch.defer_hot({lane})
    settlements = batch.settlements
    assert [event.position for event in settlements.confirmed] == [1, 21]
    assert [(event.position, outcome) for event, _, outcome in settlements.others] == [
        (2, Defer(0.0)),
        *((n, PARK) for n in range(3, 21)),
    ]


def test_a_hot_stream_that_hides_no_other_stream_is_left_alone() -> None:
    batch = Batch.plan([staged(n, "A") for n in range(1, 21)])
    batch.defer_hot(set())
    assert not batch.settlements
