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
    queues = KeyQueues()
    for name in names:
        queues.add(received(name))
    return queues


def named(arrivals: list[ReceivedEvent]) -> list[str]:
    return [str(received.delivery.token) for received in arrivals]


def test_nothing_is_ready_when_nothing_has_come() -> None:
    queues = KeyQueues()
    assert not queues.ready
    assert queues.take(5) == []
    assert len(queues) == 0


def test_the_heads_of_keys_are_given_out_in_the_order_they_came() -> None:
    queues = lined_up("A:1", "B:1", "A:2", "C:1")
    assert [named(queues.take(1)) for _ in range(3)] == [["A:1"], ["B:1"], ["C:1"]]
    assert not queues.ready


def test_a_key_is_busy_until_it_is_given_back() -> None:
    queues = lined_up("A:1", "A:2")
    taken = queues.take(1)
    assert not queues.ready
    queues.add(received("A:3"))
    assert not queues.ready
    queues.done(taken)
    queues.free([line("A")])
    assert named(queues.take(5)) == ["A:2", "A:3"]


def test_a_batch_takes_whole_keys_as_far_as_it_reaches() -> None:
    queues = lined_up("A:1", "B:1", "A:2", "B:2", "B:3")
    assert named(queues.take(3)) == ["A:1", "A:2", "B:1"]
    assert queues.take(3) == []


def test_what_is_put_back_is_at_the_head_in_its_order() -> None:
    queues = lined_up("A:1", "A:2", "B:1", "A:3")
    taken = queues.take(3)
    assert named(taken) == ["A:1", "A:2", "A:3"]
    queues.add(received("A:4"))
    queues.done(taken[:1])
    queues.put_back(taken[1:])
    assert named(queues.take(5)) == ["B:1"]
    queues.free([line("A")])
    assert named(queues.take(5)) == ["A:2", "A:3", "A:4"]


def test_a_freed_key_goes_behind_those_that_wait() -> None:
    queues = lined_up("A:1", "A:2", "B:1")
    queues.done(queues.take(1))
    queues.free([line("A")])
    assert named(queues.take(1)) == ["B:1"]


def test_what_is_being_handled_still_counts() -> None:
    queues = lined_up("A:1", "B:1")
    taken = queues.take(1)
    assert (len(queues), queues.count("s1")) == (2, 2)
    queues.done(taken)
    assert (len(queues), queues.count("s1")) == (1, 1)


def test_a_partition_is_full_when_it_has_its_share() -> None:
    queues = lined_up("A:1", "B:1")
    queues.add(received("C:1", "s2"))
    assert queues.full(2) == {"s1"}
    assert queues.full(1) == queues.partitions == {"s1", "s2"}
    assert queues.full(3) == frozenset()


def test_a_revoked_partition_takes_its_waiting_events() -> None:
    queues = lined_up("A:1", "A:2", "B:1")
    queues.add(received("B:2", "s2"))
    taken = queues.take(1)
    queues.drop({"s1"})
    assert (queues.count("s1"), queues.count("s2")) == (1, 1)
    assert named(queues.take(5)) == ["B:2"]
    queues.done(taken)
    queues.free([line("A")])
    assert queues.count("s1") == 0
    assert not queues.ready


def test_an_event_that_comes_back_after_its_partition_was_revoked_is_dropped() -> None:
    queues = lined_up("A:1", "A:2")
    taken = queues.take(2)
    queues.drop({"s1"})
    queues.put_back(taken)
    queues.free([line("A")])
    assert len(queues) == 0
    assert not queues.ready


def test_a_delayed_key_whose_partition_is_revoked_can_be_used_again() -> None:
    queues = lined_up("A:1")
    queues.put_back(queues.take(1))
    queues.drop({"s1"})
    assert len(queues) == 0
    queues.add(received("A:1", "s2"))
    assert not queues.ready, "the key still rests"
    queues.free([line("A")])
    assert named(queues.take(5)) == ["A:1"]


def test_a_partition_without_events_can_be_revoked() -> None:
    queues = KeyQueues()
    queues.drop({"s1"})
    queues.add(received("A:1"))
    queues.put_back(queues.take(1))
    queues.free([line("A")])
    assert named(queues.take(1)) == ["A:1"]


def test_a_queue_can_be_sorted_by_sequence_and_no_other_is_touched() -> None:
    queues = lined_up("A:3", "A:2", "B:2", "B:1", "A:1")
    queues.sort([line("A"), line("C")])
    assert named(queues.take(9)) == ["A:1", "A:2", "A:3", "B:2", "B:1"]
