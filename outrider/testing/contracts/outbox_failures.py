"""Contract rules for failures: an outage counts no attempt, a poison message is dead-lettered, and can be replayed."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from outrider.brokers.base import CONFIRMED, Nacked, PublishResult, Rejected, Unknown
from outrider.errors import Transient
from outrider.event import SKIPPED_TYPE, DeadLetterReason, Message, OnDeadLetter, Priority
from outrider.outbox.model import PARK, Criteria, DeadLetterEdit, Outcome, Retry, Settlement, Settlements
from outrider.retry import ATTEMPTS_MAX, RetryPolicy
from outrider.telemetry.events import BreakerOpened, EventDeadLettered, OptimisticSent, Retried
from outrider.testing.contracts.outbox_ordering import RollBack
from outrider.testing.fakes import MemoryBroker, Script
from outrider.testing.harness import Harness, numbers, order, orders

ALL = Criteria()


def deciding(result: PublishResult, *ids: UUID) -> Script:
    """Give these messages a publish result, confirm the rest."""
    chosen = {str(event_id) for event_id in ids}
    return lambda message: result if message.message_id in chosen else CONFIRMED


class FailureContract:
    """Rules for stores and relays when publishing fails."""

    async def test_an_hour_of_outage_counts_no_attempt_and_dead_letters_nothing(self, harness: Harness) -> None:
        await harness.stage(*orders(20, "A"), *orders(20, "B"))
        broker = MemoryBroker()
        broker.down = {""}
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.works_for(relay, seconds=3_600)
        assert broker.log == []
        assert (await harness.store.admin.counts())["pending"] == 40
        broker.down = set()
        await harness.works_for(relay, seconds=60)
        assert numbers(broker.log, "A") == numbers(broker.log, "B") == list(range(1, 21))
        assert not harness.observer.of(Retried)
        assert not harness.observer.of(EventDeadLettered)

    async def test_a_destination_that_is_down_holds_up_no_other(self, harness: Harness) -> None:
        await harness.stage(*orders(50, "A", topic="down"), *orders(5, "A", topic="up"))
        broker = MemoryBroker()
        broker.down = {"down"}
        relay = harness.relay(broker, batch_max=10)
        await harness.works(relay)
        await harness.works_for(relay, seconds=3_600)
        assert [message.topic for message in broker.log] == ["up"] * 5
        broker.down = set()
        await harness.works_for(relay, seconds=120)
        assert numbers([m for m in broker.log if m.topic == "down"]) == list(range(1, 51))
        assert not harness.observer.of(Retried)
        assert not harness.observer.of(EventDeadLettered)

    @pytest.mark.parametrize("ordered", [True, False])
    async def test_a_destination_that_does_not_answer_holds_up_no_other_and_a_late_answer_counts(
        self, harness: Harness, ordered: bool
    ) -> None:
        await harness.stage(*orders(3, "A", topic="mute"), *orders(5, "A", topic="up"))
        broker = MemoryBroker(ordered=ordered)
        broker.mute = {"mute"}
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.stage(*orders(2, "B", topic="mute"), order(6, "A", topic="up"))
        await harness.works(relay)
        assert [message.topic for message in broker.log] == ["up"] * 6
        counts = await harness.store.admin.counts()
        assert (counts["sent"], counts["deferred"], counts["parked"]) == (6, 2, 3)
        assert len(broker.waiting) == (3 if ordered else 1)
        broker.mute = set()
        broker.answer("mute")
        await harness.works_for(relay, seconds=5, step_seconds=1)
        late = [message for message in broker.log if message.topic == "mute"]
        assert (numbers(late, "A"), numbers(late, "B")) == ([1, 2, 3], [1, 2])
        assert len(broker.log) == 11
        assert await harness.store.admin.counts() == {"sent": 11, "dead_letter": 0}

    async def test_an_event_without_an_answer_is_published_again_after_the_timeout_and_spends_no_attempt(
        self, harness: Harness
    ) -> None:
        await harness.stage(*orders(3, "A", topic="mute"), order(1, "A", topic="up"))
        broker = MemoryBroker()
        broker.mute = {"mute"}
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.works_for(relay, seconds=600, step_seconds=5)
        assert harness.observer.of(BreakerOpened)
        assert {opened.destination for opened in harness.observer.of(BreakerOpened)} == {"mute"}
        broker.mute = set()
        await harness.works_for(relay, seconds=120, step_seconds=5)
        assert numbers([m for m in broker.log if m.topic == "mute"]) == [1, 2, 3]
        assert not harness.observer.of(Retried)
        assert not harness.observer.of(EventDeadLettered)

    @pytest.mark.parametrize("result", [Rejected("never"), Nacked("not now")])
    async def test_a_late_failure_is_counted_once(self, harness: Harness, result: PublishResult) -> None:
        [event_id, _] = await harness.stage(*orders(2, "A", topic="mute"))
        broker = MemoryBroker()
        broker.mute = {"mute"}
        relay = harness.relay(broker, on_dead_letter=OnDeadLetter.SKIP)
        await harness.works(relay)
        broker.mute = set()
        broker.answer("mute", result)
        await harness.works_for(relay, seconds=10, step_seconds=1)
        failed: list[Retried | EventDeadLettered] = [
            *harness.observer.of(Retried),
            *harness.observer.of(EventDeadLettered),
        ]
        assert [event.event_id for event in failed] == [event_id]
        assert numbers(broker.log) == ([2] if isinstance(result, Rejected) else [1, 2])

    async def test_a_late_answer_cannot_settle_an_event_of_a_lane_with_a_new_owner(self, harness: Harness) -> None:
        await harness.stage(*orders(2, "A", topic="mute"))
        broker = MemoryBroker()
        broker.mute = {"mute"}
        late = harness.relay(broker)
        await harness.works(late)
        await harness.advance(seconds=16)
        owner = harness.relay(broker, seed=1)
        await owner.heartbeat()
        await harness.works(owner)
        broker.answer("mute")
        await late.run_once()
        counts = await harness.store.admin.counts()
        assert counts["sent"] == 0
        await harness.works(owner)
        broker.mute = set()
        await harness.works_for(owner, seconds=30, step_seconds=1)
        assert numbers(broker.log) == [1, 2]
        assert (await harness.store.admin.counts())["sent"] == 2

    async def test_a_message_that_breaks_the_connection_is_isolated_and_charged_its_neighbours_are_not(
        self, harness: Harness
    ) -> None:
        [poison, *_] = await harness.stage(order(1, "P"), *[order(1, f"N{n}") for n in range(30)])
        broker = MemoryBroker(script=deciding(Unknown("connection reset"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.works_for(relay, seconds=600, step_seconds=1)
        assert {message.key for message in broker.log} == {f"N{n}" for n in range(30)}
        charged = {event.event_id for event in harness.observer.of(Retried)}
        assert charged == {poison}
        [dead] = await harness.store.admin.dead_letters(ALL)
        assert (dead["event_id"], dead["reason"], dead["attempts"]) == (poison, DeadLetterReason.POISON_MESSAGE, 3)
        assert "connection reset" in dead["failure"]["error"]

    @pytest.mark.parametrize("policy", list(OnDeadLetter))
    async def test_poison_is_dead_lettered_after_its_attempts_with_reason_and_details(
        self, harness: Harness, policy: OnDeadLetter
    ) -> None:
        [poison, *_] = await harness.stage(*orders(3, "A", sequence="auto"), order(1, "B"))
        broker = MemoryBroker(script=deciding(Nacked("bad taste"), poison))
        relay = harness.relay(broker, on_dead_letter=policy)
        await harness.works(relay)
        await harness.works_for(relay, seconds=60, step_seconds=1)
        [dead] = await harness.store.admin.dead_letters(ALL)
        assert (dead["event_id"], dead["reason"], dead["attempts"]) == (
            poison,
            DeadLetterReason.MAX_RETRIES_EXCEEDED,
            3,
        )
        assert (dead["policy"], dead["failure"]["error"], dead["payload"]) == (policy, "bad taste", {"n": 1})
        assert [event.event_id for event in harness.observer.of(EventDeadLettered)] == [poison]
        assert [event.delay_seconds for event in harness.observer.of(Retried)] == [1.0, 2.0]
        assert numbers(broker.log, "A") == ([] if policy is OnDeadLetter.BLOCK else [2, 3])
        assert numbers(broker.log, "B") == [1]

    async def test_the_highest_number_of_attempts_dead_letters_an_event_and_stops_no_other_key(
        self, harness: Harness
    ) -> None:
        poison = uuid4()
        await harness.insert(poison, "order.changed", '{"n": 1}', "A", attempts=ATTEMPTS_MAX)
        keys = [f"N{n}" for n in range(100)]
        await harness.stage(*(order(1, key) for key in keys))
        broker = MemoryBroker(script=deciding(Nacked("no"), poison))
        relay = harness.relay(broker, retry=RetryPolicy(jitter=0, max_attempts=ATTEMPTS_MAX))
        await harness.works(relay)
        [dead] = await harness.store.admin.dead_letters(ALL)
        assert (dead["event_id"], dead["attempts"]) == (poison, ATTEMPTS_MAX)
        assert sorted(str(message.key) for message in broker.log) == sorted(keys)

    @pytest.mark.parametrize("ordered", [True, False])
    async def test_an_event_of_another_band_with_the_same_key_is_charged_no_attempt_for_its_neighbour(
        self, harness: Harness, ordered: bool
    ) -> None:
        [urgent, _] = await harness.stage(order(1, "A", priority=Priority.HIGH), order(2, "A"))
        broker = MemoryBroker(ordered=ordered, script=deciding(Nacked("no"), urgent))
        await harness.works(harness.relay(broker))
        assert [(event.event_id, event.attempt) for event in harness.observer.of(Retried)] == [(urgent, 1)]
        assert numbers(broker.log) == [2]
        assert [row["event_id"] for row in await harness.store.admin.events(ALL)] == [urgent]

    async def test_dead_letters_are_counted_by_reason_and_topic_in_the_database(self, harness: Harness) -> None:
        topics = ["a"] * 5 + ["b"] * 3 + ["c"]
        await harness.stage(*(order(1, f"K{n}", topic=topic) for n, topic in enumerate(topics)))
        await harness.works(harness.relay(MemoryBroker(script=lambda message: Rejected("no"))))
        # The limit is in groups, and a count has none.
        groups = await harness.store.admin.dead_letter_groups(Criteria(limit=2))
        assert [(group["topic"], group["count"]) for group in groups] == [("a", 5), ("b", 3)]
        assert {group["reason"] for group in groups} == {DeadLetterReason.PERMANENT_FAILURE}
        [only] = await harness.store.admin.dead_letter_groups(Criteria(topic="c", limit=10))
        assert (only["topic"], only["count"]) == ("c", 1)

    async def test_the_store_knows_whether_an_event_is_due(self, harness: Harness) -> None:
        assert not await harness.store.admin.has_due()
        keys = [f"K{n}" for n in range(20)]
        ids = await harness.stage(*(order(1, key) for key in keys))
        assert await harness.store.admin.has_due()
        relay = harness.relay(MemoryBroker(script=lambda message: Nacked("not now")), retry=RetryPolicy(jitter=0))
        await harness.works(relay)
        # All streams are blocked, and none is due.
        assert not await harness.store.admin.has_due()
        await harness.advance(seconds=2)
        assert await harness.store.admin.has_due()
        for event_id in ids:
            await harness.store.admin.dead_letter(event_id, "me", {"error": "no"}, "block")
        assert not await harness.store.admin.has_due()
        await harness.store.admin.replay(ids[:1], "me")
        assert await harness.store.admin.has_due()

    async def test_a_permanent_error_is_dead_lettered_at_once(self, harness: Harness) -> None:
        [poison] = await harness.stage(order(1))
        broker = MemoryBroker(script=deciding(Rejected("no such topic"), poison))
        await harness.works(harness.relay(broker))
        [dead] = await harness.store.admin.dead_letters(ALL)
        assert (dead["reason"], dead["attempts"], dead["failure"]["kind"]) == ("permanent_failure", 1, "rejected")

    async def test_a_skipped_event_leaves_a_marker_with_its_number_in_its_place(self, harness: Harness) -> None:
        [first, poison, _] = await harness.stage(*orders(3, "A", sequence="auto"))
        broker = MemoryBroker(script=deciding(Rejected("too large"), poison))
        await harness.works(harness.relay(broker, on_dead_letter=OnDeadLetter.SKIP))
        types = [(message.headers["event_type"], message.headers["sequence"]) for message in broker.log]
        assert types == [("order.changed", "1"), (SKIPPED_TYPE, "2"), ("order.changed", "3")]
        marker = broker.log[1]
        assert (marker.headers["skipped"], marker.key, marker.topic) == (str(poison), "A", broker.log[0].topic)
        assert marker.message_id not in {str(first), str(poison)}
        assert await harness.store.admin.blocked_streams(10) == []

    async def test_an_unnumbered_event_is_skipped_without_a_marker(self, harness: Harness) -> None:
        [_, poison, _] = await harness.stage(*orders(3, "A"))
        broker = MemoryBroker(script=deciding(Rejected("too large"), poison))
        await harness.works(harness.relay(broker, on_dead_letter=OnDeadLetter.SKIP))
        assert numbers(broker.log) == [1, 3]
        assert len(broker.log) == 2
        assert await harness.store.admin.blocked_streams(10) == []

    async def test_replay_of_a_held_event_resumes_its_stream_in_order(self, harness: Harness) -> None:
        [poison, *_] = await harness.stage(*orders(4, "A"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.stage(order(5, "A"))
        await harness.works(relay)
        broker.script = deciding(CONFIRMED)
        assert await harness.store.admin.replay([poison], "me") == 1
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2, 3, 4, 5]
        assert await harness.store.admin.dead_letters(ALL) == []

    async def test_replay_of_a_skipped_event_is_late_and_says_so(self, harness: Harness) -> None:
        [poison, *_] = await harness.stage(*orders(3, "A", sequence="auto"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker, on_dead_letter=OnDeadLetter.SKIP)
        await harness.works(relay)
        broker.script = deciding(CONFIRMED)
        assert await harness.store.admin.replay([poison], "me") == 1
        await harness.works(relay)
        late: Message = broker.log[-1]
        assert (late.message_id, late.headers["replayed"], late.headers["sequence"]) == (str(poison), "true", "1")
        assert await harness.store.admin.replay([poison], "me") == 0

    async def test_a_discarded_event_lets_its_held_stream_go_on(self, harness: Harness) -> None:
        [poison, *_] = await harness.stage(*orders(3, "A", sequence="auto"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert await harness.store.admin.discard([poison], "me") == 1
        await harness.works(relay)
        assert [message.headers["sequence"] for message in broker.log] == ["1", "2", "3"]
        assert broker.log[0].headers["skipped"] == str(poison)
        assert await harness.store.admin.blocked_streams(10) == []

    async def test_an_edited_dead_letter_is_replayed_in_its_place_with_its_new_content(self, harness: Harness) -> None:
        [poison, *_] = await harness.stage(*orders(3, "A", sequence="auto"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        edit = DeadLetterEdit('{"number":1,"fixed":true}', {"fixed_by": "ann"})
        assert await harness.store.admin.edit(poison, "ann", edit)
        broker.script = deciding(CONFIRMED)
        assert await harness.store.admin.replay([poison], "ann") == 1
        await harness.works(relay)
        assert [message.headers["sequence"] for message in broker.log] == ["1", "2", "3"]
        first: Message = broker.log[0]
        assert json.loads(first.body) == {"number": 1, "fixed": True}
        assert (first.headers["fixed_by"], first.headers["gapless"]) == ("ann", "true")

    async def test_a_dead_letter_with_another_topic_leaves_its_stream(self, harness: Harness) -> None:
        [poison, *_] = await harness.stage(*orders(3, "A", sequence="auto"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert await harness.store.admin.edit(poison, "ann", DeadLetterEdit(topic="elsewhere"))
        broker.script = deciding(CONFIRMED)
        await harness.works(relay)
        # The sequence has no hole where the event was, and the stream continues.
        assert [message.headers["sequence"] for message in broker.log] == ["1", "2", "3"]
        assert broker.log[0].headers["skipped"] == str(poison)
        assert await harness.store.admin.blocked_streams(10) == []
        assert await harness.store.admin.replay([poison], "ann") == 1
        await harness.works(relay)
        moved: Message = broker.log[-1]
        assert (moved.message_id, moved.topic, moved.headers["replayed"]) == (str(poison), "elsewhere", "true")
        assert not moved.headers.keys() & {"sequence", "gapless"}

    async def test_only_a_dead_letter_can_be_edited(self, harness: Harness) -> None:
        [pending] = await harness.stage(order(1, "A"))
        for event_id in (pending, UUID(int=7)):
            assert not await harness.store.admin.edit(event_id, "ann", DeadLetterEdit("{}"))

    async def test_a_held_stream_without_followers_is_let_go_after_a_discard(self, harness: Harness) -> None:
        [poison] = await harness.stage(order(1, "A"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.store.admin.discard([poison], "me")
        await harness.works(relay)
        await harness.stage(order(2, "A"))
        await harness.works(relay)
        assert numbers(broker.log) == [2]
        assert await harness.store.admin.blocked_streams(10) == []

    async def test_a_stream_stays_held_while_any_of_its_dead_letters_is(self, harness: Harness) -> None:
        [first, second, _] = await harness.stage(*orders(3, "A"))
        broker = MemoryBroker(script=deciding(Rejected("no"), first))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert await harness.store.admin.dead_letter(second, "me", {"error": "by hand"}, "block")
        await harness.store.admin.replay([first], "me")
        broker.script = deciding(CONFIRMED)
        await harness.works(relay)
        assert numbers(broker.log) == []
        await harness.store.admin.replay([second], "me")
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2, 3]

    @pytest.mark.parametrize("policy", list(OnDeadLetter))
    async def test_dead_lettering_by_hand_in_the_middle_of_a_stream_keeps_its_order(
        self, harness: Harness, policy: OnDeadLetter
    ) -> None:
        [_, middle, _] = await harness.stage(*orders(3, "A", sequence="auto"))
        await harness.stage(*orders(3, "A", topic="another"))
        assert await harness.store.admin.dead_letter(middle, "me", {"error": "not wanted"}, policy)
        if policy is OnDeadLetter.BLOCK:
            assert await harness.store.admin.replay([middle], "me") == 1
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        mine = [message for message in broker.log if message.topic != "another"]
        assert [message.headers["sequence"] for message in mine] == ["1", "2", "3"]
        assert numbers([message for message in broker.log if message.topic == "another"]) == [1, 2, 3]

    async def test_an_event_is_not_dead_lettered_while_its_writer_sends_an_earlier_one(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1, sequence="auto"))
        [second] = await harness.stage(order(2, sequence="auto"))
        with pytest.raises(Transient, match="try again"):
            await harness.store.admin.dead_letter(second, "me", {"error": "no"}, "skip")
        await writer.send(batch)
        assert await harness.store.admin.dead_letter(second, "me", {"error": "no"}, "skip")
        await harness.works(harness.relay(broker))
        assert [message.headers["sequence"] for message in broker.log] == ["1", "2"]

    async def test_dead_lettering_by_hand_skips_or_blocks_as_asked(self, harness: Harness) -> None:
        [one, two, _] = await harness.stage(*orders(3, "A"))
        assert await harness.store.admin.dead_letter(one, "me", {"error": "not wanted"}, "skip")
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await harness.works(relay)
        assert numbers(broker.log) == [2, 3]
        assert not await harness.store.admin.dead_letter(two, "me", {"error": "too late"}, "skip")
        [dead] = await harness.store.admin.dead_letters(Criteria(reason="by_hand"))
        assert (dead["event_id"], dead["attempts"]) == (one, 0)


class OptimisticContract:
    """Rules for writers that publish their own events."""

    async def test_an_event_is_published_straight_after_its_commit(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, *orders(3, sequence="auto"))
            assert broker.log == []
        await writer.send(batch)
        assert numbers(broker.log) == [1, 2, 3]
        assert (await harness.store.admin.counts())["sent"] == 3
        relayed = MemoryBroker()
        await harness.works(harness.relay(relayed))
        assert relayed.log == []
        assert [(event.confirmed, event.yielded) for event in harness.observer.of(OptimisticSent)] == [(3, 0)]

    async def test_a_rolled_back_event_or_savepoint_is_never_published(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1))
            if harness.savepoints:
                with suppress(RollBack):
                    async with harness.savepoint(conn):
                        await batch.stage(conn, order(2, "B"))
                        raise RollBack
        await writer.send(batch)
        await harness.works(harness.relay(broker))
        removed = writer.batch()
        with suppress(RollBack):
            async with harness.transaction() as conn:
                await removed.stage(conn, order(3, "C"))
                raise RollBack
        # Even a writer that wrongly assumes a commit finds no row to publish.
        await writer.send(removed)
        assert [message.key for message in broker.log] == ["A"]

    async def test_it_never_overtakes_an_earlier_event_of_its_key(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        await harness.stage(order(1))
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(2))
        await writer.send(batch)
        assert broker.log == []
        await harness.works(harness.relay(broker))
        assert numbers(broker.log) == [1, 2]

    async def test_it_never_overtakes_a_blocked_stream(self, harness: Harness) -> None:
        broker = MemoryBroker(script=_refusing(1))
        relay = harness.relay(broker)
        await harness.stage(order(1))
        await harness.works(relay)
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(2))
        await writer.send(batch)
        assert broker.log == []
        broker.script = _refusing()
        await harness.advance(seconds=1)
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2]

    async def test_a_relay_waits_for_a_held_event_and_what_follows_it_waits_too(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker)
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1))
        await harness.stage(order(2), order(1, "B"))
        await harness.works(relay)
        assert numbers(broker.log, "A") == []
        assert numbers(broker.log, "B") == [1]
        await writer.send(batch)
        await harness.works(relay)
        assert numbers(broker.log, "A") == [1, 2]

    async def test_nothing_is_lost_when_the_writer_dies_before_or_after_publishing(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker)
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1))
        await harness.stage(order(2))
        await harness.advance(seconds=4.1)
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2]
        # The writer wakes late: the claim has expired, and no row is left to publish.
        await writer.send(batch)
        assert len(broker.log) == 2

    async def test_a_clock_set_back_does_not_keep_the_events_of_a_dead_writer(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            [event_id] = await batch.stage(conn, order(1))
        await harness.advance(seconds=-3600)
        relay = harness.relay(broker)
        await harness.works(relay)
        assert numbers(broker.log) == [1]
        # The writer lives after all: nothing is left of its claim.
        await writer.send(batch)
        assert [message.message_id for message in broker.log] == [str(event_id)]
        assert (await harness.store.admin.event(event_id))["state"] == "sent"

    async def test_a_lapsed_hold_gives_the_writer_nothing_even_while_the_row_is_there(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1))
        await harness.advance(seconds=4.1)
        await writer.send(batch)
        assert broker.log == []

    async def test_a_batch_is_sent_whole_or_left_to_the_relay(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1, "A"))
            await harness.advance(seconds=3)
            await batch.stage(conn, order(1, "B"))
        await harness.advance(seconds=2)
        await writer.send(batch)
        assert broker.log == []
        await harness.works(harness.relay(broker))
        assert {message.key for message in broker.log} == {"A", "B"}

    async def test_a_writer_whose_hold_lapsed_settles_nothing_that_a_relay_has_in_flight(
        self, harness: Harness
    ) -> None:
        broker = MemoryBroker(script=_refusing(1))
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1))
        await harness.stage(order(2))
        await harness.advance(seconds=4.1)
        relay = harness.relay(broker)
        await relay.heartbeat()
        # The writer settles while the relay, which has fetched both events, waits for the publish results.
        fetched = await harness.store.fetch(relay.lease, dict.fromkeys(relay.lease.epochs, 10))
        await harness.store.settle_claim(batch.claim, batch.claimed_ids, [])
        failure = {"kind": "nacked", "error": "not now"}
        stream = fetched.events[0].stream
        outcomes: list[Outcome] = [Retry(1.0, failure), PARK]
        settled = [Settlement(event, stream, done) for event, done in zip(fetched.events, outcomes, strict=True)]
        await harness.store.settle(relay.lease, Settlements.of(settled))
        broker.script = _refusing()
        await harness.advance(seconds=1)
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2]

    async def test_it_stops_at_a_streams_first_failure_and_the_relay_takes_over(self, harness: Harness) -> None:
        broker = MemoryBroker(script=_refusing(2))
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, *orders(4, "A", sequence="auto"), *orders(2, "B", sequence="auto"))
        await writer.send(batch)
        assert numbers(broker.log, "A") == [1]
        broker.script = _refusing()
        await harness.works(harness.relay(broker))
        assert numbers(broker.log, "A") == [1, 2, 3, 4]
        assert len(numbers(broker.log, "B")) == 2

    async def test_a_broker_that_is_down_leaves_everything_to_the_relay(self, harness: Harness) -> None:
        broker = MemoryBroker()
        broker.down = {""}
        writer = harness.writer(broker)
        for number in (1, 2):
            batch = writer.batch()
            async with harness.transaction() as conn:
                await batch.stage(conn, order(number, f"K{number}"))
            await writer.send(batch)
        assert len(broker.calls) == 1
        assert (await harness.store.admin.counts())["pending"] == 2

    async def test_switched_off_or_not_yet_due_it_is_plain_staging(self, harness: Harness) -> None:
        broker = MemoryBroker()
        for writer, event in (
            (harness.writer(broker, enabled=False), order(1, "A")),
            (harness.writer(broker), order(1, "B", available_at=harness.clock.now() + timedelta(hours=1))),
        ):
            batch = writer.batch()
            async with harness.transaction() as conn:
                await batch.stage(conn, event)
            await writer.send(batch)
        assert broker.log == []
        assert (await harness.store.admin.counts())["pending"] == 2


def _refusing(*bad: int) -> Script:
    bodies = {b'{"n":%d}' % number for number in bad}

    def script(message: Message) -> PublishResult:
        return Nacked("not now") if message.body in bodies and message.key == "A" else CONFIRMED

    return script
