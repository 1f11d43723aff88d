"""What may go out together, and what must wait."""

from __future__ import annotations

from outrider.event import Readiness, StagedEvent, default_topic
from outrider.lifecycle import State
from outrider.outbox.course import Course
from outrider.outbox.plan import plan
from outrider.outbox.streams import Run, stream_of
from outrider.outbox.waves import WAVE_BYTES_MAX, portions, waves
from outrider.outcome import CONFIRMED, PARK, Defer, Retry
from outrider.store import Cause, DueStream, Settlement
from tests.unit.build import staged, stream

RETRY = Retry(1.0, {})


def course_of(*events: StagedEvent) -> Course:
    course = plan(events, (), (), default_topic)
    course.sort(default_topic)
    return course


def positions(course: Course, limit: int = 100, *, ordered: bool = False) -> list[list[int]]:
    return [[event.position for event in run.events] for run in course.next_wave(limit, ordered=ordered)]


def test_a_wave_carries_at_most_one_event_per_stream() -> None:
    course = course_of(staged(1, "A"), staged(2, "A"), staged(3, "B"), staged(4, "A"))
    assert positions(course) == [[1], [3]]
    assert positions(course) == [[2]]
    assert positions(course) == [[4]]
    assert not course.ready


def test_a_broker_that_keeps_order_gets_whole_runs() -> None:
    course = course_of(staged(1, "A"), staged(2, "A"), staged(3, "B"), staged(4, "A"))
    assert positions(course, ordered=True) == [[1, 2, 4], [3]]
    assert not course.ready


def test_a_wave_stays_within_its_limit_and_the_rest_keeps_its_order() -> None:
    course = course_of(*(staged(n, "A") for n in range(1, 6)), staged(6, "B"))
    assert positions(course, 3, ordered=True) == [[1, 2, 3]]
    assert positions(course, 3, ordered=True) == [[4, 5], [6]]


def test_an_unordered_wave_stays_within_its_limit() -> None:
    course = course_of(*(staged(n, f"key-{n}") for n in range(1, 6)))
    assert positions(course, 2) == [[1], [2]]
    assert positions(course, 2) == [[3], [4]]
    assert positions(course, 2) == [[5]]


def test_fresh_events_are_split_into_the_first_of_every_stream_then_the_second() -> None:
    events = [staged(1, "A"), staged(2, "A"), staged(3, "B"), staged(4, "A", lane=7), staged(5, "B"), staged(6, "A")]
    assert [[event.position for event in wave] for wave in waves(events, default_topic)] == [[1, 3, 4], [2, 5], [6]]


def test_portions_keep_the_order_and_stay_within_events_and_bytes() -> None:
    third = b"x" * (WAVE_BYTES_MAX // 3)
    events = [staged(n, "A", payload=third if n > 4 else b"1") for n in range(1, 10)]
    split = [[event.position for event in portion] for portion in portions(events, 4)]
    assert split == [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
    assert portions(events[:4], 4) == [events[:4]]
    huge = staged(1, "A", payload=b"x" * (WAVE_BYTES_MAX + 1))
    assert portions([huge, huge], 4) == [[huge], [huge]]


def test_a_wave_carries_no_more_bytes_than_can_be_confirmed_in_time() -> None:
    third = b"x" * (WAVE_BYTES_MAX // 3)
    for ordered in (False, True):
        course = course_of(*(staged(n, f"key-{n}", payload=third) for n in range(1, 6)))
        assert positions(course, ordered=ordered) == [[1], [2], [3], [4]]
        assert positions(course, ordered=ordered) == [[5]]


def test_a_run_is_cut_where_its_bytes_are_too_many() -> None:
    third = b"x" * (WAVE_BYTES_MAX // 3)
    course = course_of(*(staged(n, "A", payload=third) for n in range(1, 6)), staged(6, "B"))
    assert positions(course, ordered=True) == [[1, 2, 3], [6]]
    assert positions(course, ordered=True) == [[4, 5]]


def test_an_event_larger_than_a_wave_goes_all_the_same() -> None:
    huge = b"x" * (WAVE_BYTES_MAX + 1)
    for ordered in (False, True):
        course = course_of(staged(1, "A", payload=huge), staged(2, "A"), staged(3, "B"))
        assert positions(course, ordered=ordered) == [[1]]
        assert positions(course, ordered=ordered)[0][0] == 2


def test_an_event_that_must_go_alone_is_a_run_of_its_own() -> None:
    course = course_of(*(staged(n, "A", suspect=n == 3) for n in range(1, 6)))
    runs: list[list[int]] = []
    while course.ready:
        wave = course.next_wave(100, ordered=True, alone=lambda event: event.suspect)
        runs += [[event.position for event in run.events] for run in wave]
    assert runs == [[1, 2], [3], [4, 5]]


def test_what_follows_an_event_that_stopped_is_parked() -> None:
    head, second, third = staged(1), staged(2), staged(3)
    course = course_of(head, second, third, staged(4, "B"))
    course.next_wave(100, ordered=False)
    course.stop(head, stream(), RETRY)
    assert course.settlements == [
        Settlement(head, stream(), RETRY),
        Settlement(second, stream(), PARK),
        Settlement(third, stream(), PARK),
    ]
    assert stream() not in course.ready


def test_what_is_parked_already_needs_no_second_write() -> None:
    head, parked = staged(1, state=State.FAILED), staged(2, state=State.PARKED)
    course = plan((), [DueStream(stream(), Cause.DRAINING, [head, parked])], {stream()}, default_topic)
    course.next_wave(1, ordered=False)
    course.stop(head, stream(), RETRY)
    assert course.settlements == [Settlement(head, stream(), RETRY)]


def test_a_stream_of_which_nothing_is_known_is_left_as_it_is() -> None:
    course = course_of(staged(1), staged(2))
    course.next_wave(100, ordered=False)
    course.leave(stream())
    assert not course.ready
    assert not course.settlements


def test_confirmed_events_are_counted_and_settled_in_order() -> None:
    events = [staged(1), staged(2)]
    course = Course()
    course.confirm([Run(stream(), events)])
    assert course.confirmed == 2
    assert course.settlements == [Settlement(event, stream(), CONFIRMED) for event in events]


def test_an_early_event_is_deferred_and_holds_its_stream() -> None:
    early, later = staged(1, readiness=Readiness.EARLY), staged(2)
    course = course_of(early, later)
    assert course.settlements == [Settlement(early, stream(), Defer()), Settlement(later, stream(), PARK)]
    assert not course.ready


def test_an_early_event_does_not_hold_what_comes_before_it() -> None:
    course = course_of(staged(1), staged(2, readiness=Readiness.EARLY), staged(3))
    assert positions(course) == [[1]]
    assert not course.settlements
    assert not course.ready


def test_an_event_its_writer_holds_stops_its_stream_for_this_pass_only() -> None:
    course = course_of(staged(1), staged(2, readiness=Readiness.HELD), staged(3), staged(4, "B"))
    assert positions(course) == [[1], [4]]
    assert not course.settlements
    assert not course.ready


def test_arrivals_in_a_blocked_stream_are_parked() -> None:
    arrival = staged(5)
    course = plan([arrival, staged(6, "B")], (), {stream()}, default_topic)
    assert course.settlements == [Settlement(arrival, stream(), PARK)]
    assert positions(course) == [[6]]


def test_an_event_its_writer_holds_is_not_parked_even_in_a_blocked_stream() -> None:
    course = plan([staged(5, readiness=Readiness.HELD), staged(6)], (), {stream()}, default_topic)
    assert not course.settlements
    assert not course.ready


def test_a_due_head_goes_out_while_arrivals_park_behind_it() -> None:
    head, arrival = staged(1, state=State.FAILED), staged(9)
    course = plan([arrival], [DueStream(stream(), Cause.FAILED, [head])], {stream()}, default_topic)
    assert course.settlements == [Settlement(arrival, stream(), PARK)]
    assert positions(course) == [[1]]


def test_a_drained_stream_with_nothing_waiting_is_let_go() -> None:
    course = plan((), [DueStream(stream(), Cause.DRAINING, [])], (), default_topic)
    assert course.emptied == [stream()]


def test_a_waiting_event_with_a_time_of_its_own_defers_its_stream_again() -> None:
    early = staged(1, state=State.PARKED, readiness=Readiness.EARLY)
    course = plan((), [DueStream(stream(), Cause.DRAINING, [early, staged(2)])], (), default_topic)
    assert course.settlements == [Settlement(early, stream(), Defer())]
    assert not course.ready


def test_a_run_that_drains_ends_before_an_event_with_a_time_of_its_own() -> None:
    waiting = [staged(1, state=State.PARKED), staged(2, state=State.PARKED, readiness=Readiness.EARLY), staged(3)]
    course = plan((), [DueStream(stream(), Cause.DRAINING, waiting)], (), default_topic)
    assert positions(course, ordered=True) == [[1]]
    assert not course.settlements
    assert not course.ready


def test_the_same_key_in_another_topic_or_lane_is_another_stream() -> None:
    course = course_of(staged(1), staged(2, topic="mails"), staged(3, lane=7))
    assert positions(course) == [[1], [2], [3]]


def test_a_foreign_row_without_a_topic_gets_one_by_the_rule() -> None:
    assert stream_of(staged(1, topic=None), default_topic).topic == "events.order.placed"
    assert stream_of(staged(1, topic=None, routing_key="to.me"), default_topic).topic == "to.me"
