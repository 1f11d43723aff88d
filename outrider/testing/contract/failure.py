"""Failure: an outage costs nothing, a poison message is buried, and a person can bring it back."""

from __future__ import annotations

from uuid import UUID

import pytest

from outrider.errors import Transient
from outrider.event import SKIPPED_TYPE, Message
from outrider.observer import Buried, Retried
from outrider.outcome import CONFIRMED, Policy, Reason, Refused, Rejected, Unresolved, Verdict
from outrider.store import Criteria
from outrider.testing.broker import MemoryBroker, Script
from outrider.testing.harness import Harness, numbers, order, orders

ALL = Criteria()


def deciding(verdict: Verdict, *ids: UUID) -> Script:
    """Give these messages a verdict, confirm the others."""
    chosen = {str(event_id) for event_id in ids}
    return lambda message: verdict if message.message_id in chosen else CONFIRMED


class FailureContract:
    """What every store and relay must do when things go wrong."""

    async def test_an_hour_of_outage_spends_no_attempt_and_buries_nothing(self, harness: Harness) -> None:
        await harness.stage(*orders(20, "A"), *orders(20, "B"))
        broker = MemoryBroker()
        broker.down = {""}
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.works_for(relay, seconds=3_600)
        assert broker.log == []
        assert (await harness.store.desk.counts())["pending"] == 40
        broker.down = set()
        await harness.works_for(relay, seconds=60)
        assert numbers(broker.log, "A") == numbers(broker.log, "B") == list(range(1, 21))
        assert not harness.notebook.of(Retried)
        assert not harness.notebook.of(Buried)

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
        assert not harness.notebook.of(Retried)
        assert not harness.notebook.of(Buried)

    async def test_a_message_that_breaks_the_connection_is_isolated_and_charged_its_neighbours_are_not(
        self, harness: Harness
    ) -> None:
        [poison, *_] = await harness.stage(order(1, "P"), *[order(1, f"N{n}") for n in range(30)])
        broker = MemoryBroker(script=deciding(Unresolved("connection reset"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.works_for(relay, seconds=600, step_seconds=1)
        assert {message.key for message in broker.log} == {f"N{n}" for n in range(30)}
        charged = {fact.event_id for fact in harness.notebook.of(Retried)}
        assert charged == {poison}
        [dead] = await harness.store.desk.dead_letters(ALL)
        assert (dead["event_id"], dead["reason"], dead["attempts"]) == (poison, Reason.POISON_MESSAGE, 3)
        assert "connection reset" in dead["failure"]["error"]

    @pytest.mark.parametrize("policy", list(Policy))
    async def test_poison_is_buried_after_its_attempts_with_reason_and_details(
        self, harness: Harness, policy: Policy
    ) -> None:
        [poison, *_] = await harness.stage(*orders(3, "A", sequence="auto"), order(1, "B"))
        broker = MemoryBroker(script=deciding(Refused("bad taste"), poison))
        relay = harness.relay(broker, dead_letter_policy=policy)
        await harness.works(relay)
        await harness.works_for(relay, seconds=60, step_seconds=1)
        [dead] = await harness.store.desk.dead_letters(ALL)
        assert (dead["event_id"], dead["reason"], dead["attempts"]) == (poison, Reason.MAX_RETRIES_EXCEEDED, 3)
        assert (dead["policy"], dead["failure"]["error"], dead["payload"]) == (policy, "bad taste", {"n": 1})
        assert [fact.event_id for fact in harness.notebook.of(Buried)] == [poison]
        assert [fact.delay_seconds for fact in harness.notebook.of(Retried)] == [1.0, 2.0]
        assert numbers(broker.log, "A") == ([] if policy is Policy.HOLD else [2, 3])
        assert numbers(broker.log, "B") == [1]

    async def test_a_permanent_error_is_buried_at_once(self, harness: Harness) -> None:
        [poison] = await harness.stage(order(1))
        broker = MemoryBroker(script=deciding(Rejected("no such topic"), poison))
        await harness.works(harness.relay(broker))
        [dead] = await harness.store.desk.dead_letters(ALL)
        assert (dead["reason"], dead["attempts"], dead["failure"]["kind"]) == ("permanent_failure", 1, "rejected")

    async def test_a_skipped_event_leaves_a_marker_with_its_number_in_its_place(self, harness: Harness) -> None:
        [first, poison, _] = await harness.stage(*orders(3, "A", sequence="auto"))
        broker = MemoryBroker(script=deciding(Rejected("too large"), poison))
        await harness.works(harness.relay(broker, dead_letter_policy=Policy.SKIP))
        types = [(message.headers["event_type"], message.headers["sequence"]) for message in broker.log]
        assert types == [("order.changed", "1"), (SKIPPED_TYPE, "2"), ("order.changed", "3")]
        marker = broker.log[1]
        assert (marker.headers["skipped"], marker.key, marker.topic) == (str(poison), "A", broker.log[0].topic)
        assert marker.message_id not in {str(first), str(poison)}
        assert await harness.store.desk.blocked_streams(10) == []

    async def test_an_unnumbered_event_is_skipped_without_a_marker(self, harness: Harness) -> None:
        [_, poison, _] = await harness.stage(*orders(3, "A"))
        broker = MemoryBroker(script=deciding(Rejected("too large"), poison))
        await harness.works(harness.relay(broker, dead_letter_policy=Policy.SKIP))
        assert numbers(broker.log) == [1, 3]
        assert len(broker.log) == 2
        assert await harness.store.desk.blocked_streams(10) == []

    async def test_replay_of_a_held_event_resumes_its_stream_in_order(self, harness: Harness) -> None:
        [poison, *_] = await harness.stage(*orders(4, "A"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.stage(order(5, "A"))
        await harness.works(relay)
        broker.script = deciding(CONFIRMED)
        assert await harness.store.desk.replay([poison], "me") == 1
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2, 3, 4, 5]
        assert await harness.store.desk.dead_letters(ALL) == []

    async def test_replay_of_a_skipped_event_is_late_and_says_so(self, harness: Harness) -> None:
        [poison, *_] = await harness.stage(*orders(3, "A", sequence="auto"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker, dead_letter_policy=Policy.SKIP)
        await harness.works(relay)
        broker.script = deciding(CONFIRMED)
        assert await harness.store.desk.replay([poison], "me") == 1
        await harness.works(relay)
        late: Message = broker.log[-1]
        assert (late.message_id, late.headers["replayed"], late.headers["sequence"]) == (str(poison), "true", "1")
        assert await harness.store.desk.replay([poison], "me") == 0

    async def test_a_discarded_event_lets_its_held_stream_go_on(self, harness: Harness) -> None:
        [poison, *_] = await harness.stage(*orders(3, "A", sequence="auto"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert await harness.store.desk.discard([poison], "me") == 1
        await harness.works(relay)
        assert [message.headers["sequence"] for message in broker.log] == ["1", "2", "3"]
        assert broker.log[0].headers["skipped"] == str(poison)
        assert await harness.store.desk.blocked_streams(10) == []

    async def test_a_held_stream_without_followers_is_let_go_after_a_discard(self, harness: Harness) -> None:
        [poison] = await harness.stage(order(1, "A"))
        broker = MemoryBroker(script=deciding(Rejected("no"), poison))
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.store.desk.discard([poison], "me")
        await harness.works(relay)
        await harness.stage(order(2, "A"))
        await harness.works(relay)
        assert numbers(broker.log) == [2]
        assert await harness.store.desk.blocked_streams(10) == []

    async def test_a_stream_stays_held_while_any_of_its_dead_letters_is(self, harness: Harness) -> None:
        [first, second, _] = await harness.stage(*orders(3, "A"))
        broker = MemoryBroker(script=deciding(Rejected("no"), first))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert await harness.store.desk.bury(second, "me", {"error": "by hand"}, "hold")
        await harness.store.desk.replay([first], "me")
        broker.script = deciding(CONFIRMED)
        await harness.works(relay)
        assert numbers(broker.log) == []
        await harness.store.desk.replay([second], "me")
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2, 3]

    @pytest.mark.parametrize("policy", list(Policy))
    async def test_burying_by_hand_in_the_middle_of_a_stream_keeps_its_order(
        self, harness: Harness, policy: Policy
    ) -> None:
        [_, middle, _] = await harness.stage(*orders(3, "A", sequence="auto"))
        await harness.stage(*orders(3, "A", topic="another"))
        assert await harness.store.desk.bury(middle, "me", {"error": "not wanted"}, policy)
        if policy is Policy.HOLD:
            assert await harness.store.desk.replay([middle], "me") == 1
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        mine = [message for message in broker.log if message.topic != "another"]
        assert [message.headers["sequence"] for message in mine] == ["1", "2", "3"]
        assert numbers([message for message in broker.log if message.topic == "another"]) == [1, 2, 3]

    async def test_an_event_is_not_buried_while_its_writer_sends_an_earlier_one(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1, sequence="auto"))
        [second] = await harness.stage(order(2, sequence="auto"))
        with pytest.raises(Transient, match="try again"):
            await harness.store.desk.bury(second, "me", {"error": "no"}, "skip")
        await writer.send(batch)
        assert await harness.store.desk.bury(second, "me", {"error": "no"}, "skip")
        await harness.works(harness.relay(broker))
        assert [message.headers["sequence"] for message in broker.log] == ["1", "2"]

    async def test_burying_by_hand_skips_or_holds_as_told(self, harness: Harness) -> None:
        [one, two, _] = await harness.stage(*orders(3, "A"))
        assert await harness.store.desk.bury(one, "me", {"error": "not wanted"}, "skip")
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await harness.works(relay)
        assert numbers(broker.log) == [2, 3]
        assert not await harness.store.desk.bury(two, "me", {"error": "too late"}, "skip")
        [dead] = await harness.store.desk.dead_letters(Criteria(reason="by_hand"))
        assert (dead["event_id"], dead["attempts"]) == (one, 0)
