"""Contract rules for messages: stored until a turn reads them, read only once, and due at once."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from outrider.saga.model import MessageKind, NewSagaMessage, ParticipantEntry, Phase, SagaRecord, Status
from outrider.testing.saga_harness import LEASE_SECONDS, SagaBench, new_saga, reply

KEY = "saga-1:reserve"

REPLY = b'{"reservation": "R-1", "name": "\xc3\xa9"}'

FRESH = ParticipantEntry(fresh=True, barred=False)


async def _resting(bench: SagaBench, correlation_id: str = "A-7") -> SagaRecord:
    """Make a saga in which only a message starts a turn."""
    record = await bench.start_and_claim(correlation_id)
    await bench.release(record, status=Status.RUNNING)
    return record


class MessageRules:
    """Every process except the owner delivers messages to a saga."""

    async def test_messages_are_read_as_they_were_delivered_and_in_order(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        order = NewSagaMessage(saga_id, MessageKind.OPERATOR, "retry", None, b'{"actor": "ann"}', uuid4())
        first = reply(saga_id)
        for message in (order, first):
            assert await bench.deliver(message) == 1
        record = await bench.claim_one()
        assert [message[1:6] for message in record.messages] == [order[1:6], first[1:6]]
        assert [message.delivered_at for message in record.messages] == [record.now, record.now]

    async def test_the_same_event_delivered_twice_is_one_message(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        once = reply(saga_id)
        assert await bench.deliver(once, once, reply(saga_id)) == 2
        assert await bench.deliver(once) == 0
        async with bench.store.transaction() as tx:
            assert await bench.store.deliver(tx, [once]) == 0
            assert await bench.store.deliver(tx, [reply(saga_id)]) == 1
        assert len((await bench.claim_one()).messages) == 3

    async def test_the_same_event_delivered_by_two_at_once_is_one_message(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        once = reply(saga_id)
        assert sum(await asyncio.gather(bench.deliver(once), bench.deliver(once))) == 1

    async def test_one_event_may_be_a_message_for_several_sagas(self, bench: SagaBench) -> None:
        event_id = uuid4()
        ids = [(await _resting(bench, name)).instance.saga_id for name in ("A-1", "A-2")]
        assert await bench.deliver(*[reply(saga_id, event_id=event_id) for saga_id in ids]) == 2

    async def test_a_message_that_is_rolled_back_never_was(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        async with bench.rolled_back() as tx:
            assert await bench.store.deliver(tx, [reply(saga_id)]) == 1
        assert await bench.claim() == []
        assert (await bench.show(saga_id)).messages == ()

    async def test_a_message_to_an_unknown_saga_is_not_kept(self, bench: SagaBench) -> None:
        saga = new_saga()
        assert await bench.deliver(reply(saga.saga_id)) == 0
        assert await bench.deliver() == 0
        await bench.start(saga)
        assert (await bench.claim_one()).messages == ()

    async def test_a_message_for_a_saga_of_another_type_is_not_kept(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        meant = reply(saga_id)._replace(saga_type="refund")
        assert await bench.deliver(meant) == 0
        async with bench.store.transaction() as tx:
            assert await bench.call_driver("deliver_messages", tx, [meant]) == 0
        assert await bench.deliver(meant._replace(saga_type="order"), reply(saga_id)) == 2
        assert len((await bench.claim_one()).messages) == 2

    @pytest.mark.parametrize("status", [Status.COMPLETED, Status.COMPENSATED])
    async def test_a_message_to_a_saga_that_has_ended_is_not_kept(self, bench: SagaBench, status: Status) -> None:
        record = await bench.start_and_claim()
        await bench.release(record, status=status)
        assert await bench.deliver(reply(record.instance.saga_id)) == 0
        assert await bench.claim() == []

    async def test_a_message_reaches_a_saga_that_has_failed(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.release(record, status=Status.FAILED, needs_attention=True)
        assert await bench.claim() == []
        assert await bench.deliver(reply(record.instance.saga_id)) == 1
        assert (await bench.claim_one()).instance.status is Status.FAILED

    async def test_an_unseen_message_wakes_a_saga_without_owner(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        assert await bench.claim() == []
        await bench.deliver(reply(saga_id))
        record = await bench.claim_one("bob")
        assert (record.instance.saga_id, record.instance.owner, len(record.messages)) == (saga_id, "bob", 1)

    async def test_an_unseen_message_wakes_a_saga_that_is_due_later(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.release(record, wake_seconds=3600)
        await bench.deliver(reply(record.instance.saga_id))
        assert len((await bench.claim_one()).messages) == 1

    async def test_a_seen_message_stays_and_wakes_no_worker(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        await bench.deliver(reply(saga_id))
        record = await bench.claim_one()
        early = record.messages[0].message_id
        await bench.release(record, seen=[early])
        assert await bench.claim() == []
        await bench.deliver(reply(saga_id, "stock.counted"))
        assert [message.name for message in (await bench.claim_one()).messages] == ["stock.reserved", "stock.counted"]
        assert len((await bench.show(saga_id)).messages) == 2

    async def test_a_taken_message_is_removed(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        await bench.deliver(reply(saga_id), reply(saga_id, "stock.counted"))
        record = await bench.claim_one()
        first, second = (message.message_id for message in record.messages)
        await bench.release(record, taken=[first, second], seen=[second])
        assert (await bench.show(saga_id)).messages == ()
        assert await bench.claim() == []

    async def test_a_turn_takes_no_messages_of_another_saga(self, bench: SagaBench) -> None:
        mine = (await _resting(bench, "A-1")).instance.saga_id
        other = (await _resting(bench, "A-2")).instance.saga_id
        await bench.deliver(reply(mine), reply(other))
        records = {record.instance.saga_id: record for record in await bench.claim()}
        messages = [message.message_id for record in records.values() for message in record.messages]
        await bench.release(records[mine], taken=messages)
        await bench.release(records[other])
        assert (await bench.claim_one()).instance.saga_id == other

    async def test_a_message_delivered_while_a_saga_is_owned_is_found_after_its_release(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        await bench.deliver(reply(saga_id))
        record = await bench.claim_one()
        await bench.deliver(reply(saga_id, "stock.counted"))
        assert await bench.claim("bob") == []
        await bench.release(record, taken=[message.message_id for message in record.messages])
        assert [message.name for message in (await bench.claim_one("bob")).messages] == ["stock.counted"]

    async def test_a_message_is_found_though_its_reader_died(self, bench: SagaBench) -> None:
        saga_id = (await _resting(bench)).instance.saga_id
        await bench.deliver(reply(saga_id))
        await bench.claim_one()
        await bench.advance(seconds=LEASE_SECONDS)
        assert len((await bench.claim_one("bob")).messages) == 1

    async def test_a_saga_that_ends_with_mail_unread_is_not_woken(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.deliver(reply(record.instance.saga_id))
        await bench.release(record, status=Status.COMPLETED)
        assert await bench.claim("bob") == []


async def _enter(bench: SagaBench, phase: Phase, *, reply: bytes | None = None, key: str = KEY) -> ParticipantEntry:
    """Deliver a command in a separate transaction; store a given reply."""
    async with bench.store.transaction() as tx:
        entered: ParticipantEntry = await bench.call_driver("participant_enter", tx, "stock", key, phase)
        if entered.fresh and reply is not None:
            await bench.call_driver("participant_save_reply", tx, "stock", key, phase, reply)
    return entered


class ParticipantRules:
    """Participants handle each command once."""

    async def test_a_command_that_comes_first_is_let_in(self, bench: SagaBench) -> None:
        assert await _enter(bench, Phase.ACTION, reply=REPLY) == FRESH
        assert await _enter(bench, Phase.ACTION, key="saga-2:reserve") == FRESH

    @pytest.mark.parametrize("phase", list(Phase))
    async def test_a_repeated_command_gets_the_stored_reply(self, bench: SagaBench, phase: Phase) -> None:
        if phase is Phase.COMPENSATION:
            await _enter(bench, Phase.ACTION, reply=b'"done"')
        assert await _enter(bench, phase, reply=REPLY) == FRESH
        for _ in range(2):
            assert await _enter(bench, phase) == ParticipantEntry(fresh=False, barred=False, reply=REPLY)

    async def test_a_compensation_after_its_action_is_let_in(self, bench: SagaBench) -> None:
        await _enter(bench, Phase.ACTION, reply=REPLY)
        assert await _enter(bench, Phase.COMPENSATION, reply=b'"released"') == FRESH
        assert (await _enter(bench, Phase.ACTION)).reply == REPLY

    async def test_a_compensation_before_its_action_bars_it(self, bench: SagaBench) -> None:
        assert await _enter(bench, Phase.COMPENSATION, reply=REPLY) == ParticipantEntry(fresh=True, barred=True)
        for _ in range(2):
            assert await _enter(bench, Phase.ACTION) == ParticipantEntry(fresh=False, barred=True)
        again = await _enter(bench, Phase.COMPENSATION)
        assert again == ParticipantEntry(fresh=False, barred=True, reply=REPLY)

    async def test_a_command_that_is_rolled_back_has_not_come(self, bench: SagaBench) -> None:
        for phase in (Phase.ACTION, Phase.COMPENSATION):
            async with bench.rolled_back() as tx:
                assert (await bench.call_driver("participant_enter", tx, "stock", KEY, phase)).fresh
                await bench.call_driver("participant_save_reply", tx, "stock", KEY, phase, REPLY)
        assert await _enter(bench, Phase.ACTION) == FRESH

    async def test_participants_have_entries_of_their_own(self, bench: SagaBench) -> None:
        await _enter(bench, Phase.COMPENSATION)
        async with bench.store.transaction() as tx:
            assert await bench.call_driver("participant_enter", tx, "bank", KEY, Phase.ACTION) == FRESH

    async def test_the_same_command_in_two_transactions_at_once_is_let_in_once(self, bench: SagaBench) -> None:
        entered = await asyncio.gather(*(_enter(bench, Phase.ACTION, reply=REPLY) for _ in range(2)))
        assert sorted(one.fresh for one in entered) == [False, True]
        assert {one.reply for one in entered} == {None, REPLY}

    async def test_of_action_and_compensation_at_once_the_second_knows_of_the_first(self, bench: SagaBench) -> None:
        action, compensate = await asyncio.gather(_enter(bench, Phase.ACTION), _enter(bench, Phase.COMPENSATION))
        assert compensate.fresh
        assert action.fresh is not compensate.barred

    async def test_a_transaction_sees_its_own_reply(self, bench: SagaBench) -> None:
        async with bench.store.transaction() as tx:
            assert await bench.call_driver("participant_enter", tx, "stock", KEY, Phase.ACTION) == FRESH
            await bench.call_driver("participant_save_reply", tx, "stock", KEY, Phase.ACTION, REPLY)
            again = await bench.call_driver("participant_enter", tx, "stock", KEY, Phase.ACTION)
        assert again == ParticipantEntry(fresh=False, barred=False, reply=REPLY)
