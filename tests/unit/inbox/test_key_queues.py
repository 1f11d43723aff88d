"""Key queues: keys side by side, each in order, and the removal of revoked partitions."""

from __future__ import annotations

from outrider.event import InboxStream, ReceivedEvent
from outrider.inbox.key_queues import KeyQueues
from outrider.wire import decode
from tests.support.scripted_source import delivery


def received(name: str, partition: str = "s1") -> ReceivedEvent:
    return decode(delivery(name, partition=partition))


def line(key: str) -> InboxStream:
    return InboxStream("orders", key)


def lined_up(*names: str) -> KeyQueues:
    lineup = KeyQueues()
    for name in names:
        lineup.add(received(name))
    return lineup


def named(arrivals: list[ReceivedEvent]) -> list[str]:
    return [str(received.delivery.token) for received in arrivals]


def test_nothing_is_ready_when_nothing_has_come() -> None:
    lineup = KeyQueues()
    assert not lineup.ready
    assert lineup.take(5) == []
    assert len(lineup) == 0


def test_the_heads_of_keys_are_given_out_in_the_order_they_came() -> None:
    lineup = lined_up("A:1", "B:1", "A:2", "C:1")
    assert [named(lineup.take(1)) for _ in range(3)] == [["A:1"], ["B:1"], ["C:1"]]
    assert not lineup.ready


def test_a_key_is_busy_until_it_is_given_back() -> None:
    lineup = lined_up("A:1", "A:2")
    taken = lineup.take(1)
    assert not lineup.ready
    lineup.add(received("A:3"))
    assert not lineup.ready
    lineup.done(taken)
    lineup.free([line("A")])
    assert named(lineup.take(5)) == ["A:2", "A:3"]


def test_a_batch_takes_whole_keys_as_far_as_it_reaches() -> None:
    lineup = lined_up("A:1", "B:1", "A:2", "B:2", "B:3")
    assert named(lineup.take(3)) == ["A:1", "A:2", "B:1"]
    assert lineup.take(3) == []


def test_what_is_put_back_is_at_the_head_in_its_order() -> None:
    lineup = lined_up("A:1", "A:2", "B:1", "A:3")
    taken = lineup.take(3)
    assert named(taken) == ["A:1", "A:2", "A:3"]
    lineup.add(received("A:4"))
    lineup.done(taken[:1])
    lineup.put_back(taken[1:])
    assert named(lineup.take(5)) == ["B:1"]
    lineup.free([line("A")])
    assert named(lineup.take(5)) == ["A:2", "A:3", "A:4"]


def test_a_freed_key_goes_behind_those_that_wait() -> None:
    lineup = lined_up("A:1", "A:2", "B:1")
    lineup.done(lineup.take(1))
    lineup.free([line("A")])
    assert named(lineup.take(1)) == ["B:1"]


def test_what_is_being_handled_still_counts() -> None:
    lineup = lined_up("A:1", "B:1")
    taken = lineup.take(1)
    assert (len(lineup), lineup.count("s1")) == (2, 2)
    lineup.done(taken)
    assert (len(lineup), lineup.count("s1")) == (1, 1)


def test_a_partition_is_full_when_it_has_its_share() -> None:
    lineup = lined_up("A:1", "B:1")
    lineup.add(received("C:1", "s2"))
    assert lineup.full(2) == {"s1"}
    assert lineup.full(1) == lineup.partitions == {"s1", "s2"}
    assert lineup.full(3) == frozenset()


def test_a_revoked_partition_takes_its_waiting_events() -> None:
    lineup = lined_up("A:1", "A:2", "B:1")
    lineup.add(received("B:2", "s2"))
    taken = lineup.take(1)
    lineup.drop({"s1"})
    assert (lineup.count("s1"), lineup.count("s2")) == (1, 1)
    assert named(lineup.take(5)) == ["B:2"]
    lineup.done(taken)
    lineup.free([line("A")])
    assert lineup.count("s1") == 0
    assert not lineup.ready


def test_an_event_that_comes_back_after_its_partition_was_revoked_is_dropped() -> None:
    lineup = lined_up("A:1", "A:2")
    taken = lineup.take(2)
    lineup.drop({"s1"})
    lineup.put_back(taken)
    lineup.free([line("A")])
    assert len(lineup) == 0
    assert not lineup.ready


def test_a_delayed_key_whose_partition_is_revoked_can_be_used_again() -> None:
    lineup = lined_up("A:1")
    lineup.put_back(lineup.take(1))
    lineup.drop({"s1"})
    assert len(lineup) == 0
    lineup.add(received("A:1", "s2"))
    assert not lineup.ready, "the key still rests"
    lineup.free([line("A")])
    assert named(lineup.take(5)) == ["A:1"]


def test_a_partition_without_events_can_be_revoked() -> None:
    lineup = KeyQueues()
    lineup.drop({"s1"})
    lineup.add(received("A:1"))
    lineup.put_back(lineup.take(1))
    lineup.free([line("A")])
    assert named(lineup.take(1)) == ["A:1"]


def test_a_queue_can_be_sorted_by_sequence_and_no_other_is_touched() -> None:
    lineup = lined_up("A:3", "A:2", "B:2", "B:1", "A:1")
    lineup.sort([line("A"), line("C")])
    assert named(lineup.take(9)) == ["A:1", "A:2", "A:3", "B:2", "B:1"]
