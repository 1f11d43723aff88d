"""Optimistic send: never overtakes, never publishes what rolled back, loses nothing."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from outrider.event import Message
from outrider.observer import OptimisticSent
from outrider.outbox.streams import stream_of
from outrider.outcome import CONFIRMED, PARK, Outcome, Refused, Retry, Verdict
from outrider.store import Settlement
from outrider.testing.broker import MemoryBroker, Script
from outrider.testing.contract.staging import Undo
from outrider.testing.harness import Harness, numbers, order, orders


class OptimisticContract:
    """What every store must do for writers that publish their own events."""

    async def test_an_event_is_published_straight_after_its_commit(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, *orders(3, sequence="auto"))
            assert broker.log == []
        await writer.send(batch)
        assert numbers(broker.log) == [1, 2, 3]
        assert (await harness.store.desk.counts())["sent"] == 3
        relayed = MemoryBroker()
        await harness.works(harness.relay(relayed))
        assert relayed.log == []
        assert [(fact.confirmed, fact.yielded) for fact in harness.notebook.of(OptimisticSent)] == [(3, 0)]

    async def test_a_rolled_back_event_or_savepoint_is_never_published(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1))
            if harness.savepoints:
                with suppress(Undo):
                    async with harness.savepoint(conn):
                        await batch.stage(conn, order(2, "B"))
                        raise Undo
        await writer.send(batch)
        gone = writer.batch()
        with suppress(Undo):
            async with harness.transaction() as conn:
                await gone.stage(conn, order(3, "C"))
                raise Undo
        # Even a writer that wrongly believes in a commit finds no row to publish.
        await writer.send(gone)
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
        # The writer wakes late: its hold has lapsed, so there is nothing left for it to do.
        await writer.send(batch)
        assert len(broker.log) == 2

    async def test_a_lapsed_hold_gives_the_writer_nothing_even_while_the_row_is_there(self, harness: Harness) -> None:
        broker = MemoryBroker()
        writer = harness.writer(broker)
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, order(1))
        await harness.advance(seconds=4.1)
        await writer.send(batch)
        assert broker.log == []

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
        await relay.keep()
        # The writer settles while the relay, which has taken both events, waits for the broker's verdict.
        fetched = await harness.store.fetch(relay.lease, dict.fromkeys(relay.lease.epochs, 10))
        await harness.store.settle_hold(batch.hold, batch.held, [])
        failure = {"kind": "refused", "error": "not now"}
        stream = stream_of(fetched.events[0], relay.rule)
        outcomes: list[Outcome] = [Retry(1.0, failure), PARK]
        settled = [Settlement(event, stream, done) for event, done in zip(fetched.events, outcomes, strict=True)]
        await harness.store.settle(relay.lease, settled)
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
        assert (await harness.store.desk.counts())["pending"] == 2

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
        assert (await harness.store.desk.counts())["pending"] == 2


def _refusing(*bad: int) -> Script:
    bodies = {b'{"n":%d}' % number for number in bad}

    def script(message: Message) -> Verdict:
        return Refused("not now") if message.body in bodies and message.key == "A" else CONFIRMED

    return script
