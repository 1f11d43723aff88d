"""A participant, and the delivery of its replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest

from outrider import Event, RetryPolicy
from outrider.app import saga_inbox
from outrider.errors import InvalidEvent, Permanent, UsageError
from outrider.event import OnDeadLetter
from outrider.saga import Participant, Rejection, Saga, SagaRegistry
from outrider.saga.definition.saga import saga_id_of
from outrider.saga.model import MessageKind
from outrider.saga.participant import CommandOutcome
from outrider.telemetry.events import ReplyOfUnknownSaga
from tests.support.saga_shop import Order, Shop, begun, order_saga, request

SAGA_ID = UUID(int=7)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOTHING = Event("stock.released", {"nothing": True})
RESERVED = Event("stock.reserved", {"reservation": "R-1"})
SAME = ("event_type", "payload", "topic", "key", "aggregate_type", "aggregate_id", "schema_version", "saga_id")


def command(phase: str = "action", step: str = "reserve", **fields: Any) -> Event:
    headers = {"saga_key": f"{SAGA_ID}:{step}", "saga_phase": phase, "traceparent": TRACE}
    kind = "stock.reserve" if phase == "action" else "stock.release"
    plain: dict[str, Any] = {"saga_id": str(SAGA_ID), "headers": headers, "event_id": uuid4()}
    return Event(kind, {"order": "A-7"}, **{**plain, **fields})


@dataclass
class Stock:
    """A participant, and what it has done."""

    answer: Event | Rejection = RESERVED
    done: list[str] = field(default_factory=list)
    shop: Shop = field(default_factory=lambda: Shop(_saga()))
    participant: Participant = field(default_factory=lambda: Participant("stock"))

    async def act(self, asked: Event) -> CommandOutcome:
        async with self.shop.store.transaction() as tx:
            return await self.participant.execute(tx, asked, self._do)

    async def compensate(self, asked: Event) -> CommandOutcome:
        async with self.shop.store.transaction() as tx:
            return await self.participant.compensate(tx, asked, self._compensate, nothing=NOTHING)

    async def _do(self, asked: Event, tx: Any) -> Event | Rejection:
        self.done.append("did")
        return self.answer

    def _compensate(self, asked: Event, tx: Any) -> Event:
        self.done.append("undid")
        return Event("stock.released", {"nothing": False})

    async def replies(self) -> list[tuple[str, Any]]:
        return [(event.event_type, event.payload) for event in await self.shop.sent()]


def _saga() -> Saga[Order]:
    saga = order_saga()
    request(saga)
    return saga


async def test_a_reply_finds_its_saga_by_id_and_key() -> None:
    stock, asked = Stock(), command()
    assert await stock.act(asked) is CommandOutcome.DONE
    [reply] = await stock.shop.sent()
    assert (reply.event_type, reply.payload) == ("stock.reserved", {"reservation": "R-1"})
    assert (reply.saga_id, reply.key) == (str(SAGA_ID), str(SAGA_ID))
    assert reply.headers["saga_key"] == f"{SAGA_ID}:reserve"
    assert (reply.headers["causation_id"], reply.headers["traceparent"]) == (str(asked.event_id), TRACE)


async def test_a_repeated_command_is_done_once_and_answered_again() -> None:
    answer = Event(
        "stock.reserved",
        {"id": UUID(int=1)},
        topic="replies",
        headers={"shelf": "7"},
        aggregate_type="shelf",
        aggregate_id="S-7",
        schema_version=2,
        retry=RetryPolicy(max_attempts=3),
    )
    stock = Stock(answer)
    assert await stock.act(command()) is CommandOutcome.DONE
    assert await stock.act(command()) is CommandOutcome.REPEATED
    assert stock.done == ["did"]
    first, again = await stock.shop.sent()
    assert first.event_id != again.event_id
    for name in (
        "event_type",
        "payload",
        "topic",
        "key",
        "aggregate_type",
        "aggregate_id",
        "schema_version",
        "saga_id",
    ):
        assert getattr(first, name) == getattr(again, name)
    assert (again.headers["shelf"], again.headers["saga_key"]) == ("7", f"{SAGA_ID}:reserve")


async def test_steps_of_one_saga_are_distinguished_at_the_same_participant() -> None:
    stock = Stock()
    await stock.act(command(step="hotel"))
    await stock.act(command(step="car"))
    assert stock.done == ["did", "did"]


async def test_a_compensation_compensates_once_and_is_answered_again() -> None:
    stock = Stock()
    await stock.act(command())
    assert await stock.compensate(command("compensation")) is CommandOutcome.DONE
    assert await stock.compensate(command("compensation")) is CommandOutcome.REPEATED
    assert stock.done == ["did", "undid"]
    assert (await stock.replies())[1:] == [("stock.released", {"nothing": False})] * 2


async def test_an_action_that_comes_after_its_compensation_is_ignored() -> None:
    stock = Stock()
    assert await stock.compensate(command("compensation")) is CommandOutcome.DONE
    assert await stock.act(command()) is CommandOutcome.BARRED
    assert await stock.act(command()) is CommandOutcome.BARRED
    assert stock.done == []
    assert await stock.replies() == [("stock.released", {"nothing": True})]


async def test_a_repeated_action_after_its_compensation_gets_its_old_answer() -> None:
    stock = Stock()
    await stock.act(command())
    await stock.compensate(command("compensation"))
    assert await stock.act(command()) is CommandOutcome.REPEATED
    assert stock.done == ["did", "undid"]


async def test_a_rejected_command_is_not_compensated() -> None:
    stock = Stock(Rejection(Event("stock.refused", {"why": "sold out"})))
    assert await stock.act(command()) is CommandOutcome.DONE
    assert await stock.act(command()) is CommandOutcome.REPEATED
    assert await stock.compensate(command("compensation")) is CommandOutcome.DONE
    assert stock.done == ["did"]
    rejected = ("stock.refused", {"why": "sold out"})
    # They are on two topics, so the one may overtake the other.
    assert sorted(await stock.replies(), key=str) == [rejected, rejected, ("stock.released", {"nothing": True})]


async def test_an_answered_command_is_compensated_although_the_participant_has_forgotten_it() -> None:
    saga = _waiting()
    stock = Stock(shop=Shop(saga))
    saga_id = await begun(stock.shop, saga)
    [asked] = await stock.shop.sent()
    await stock.act(asked)
    await stock.shop.answer(asked, "stock.reserved")
    await stock.shop.works()
    stock.shop.clock.advance(seconds=91 * 86_400)
    await stock.shop.worker.run_maintenance()
    await stock.shop.order(saga_id, "compensate")
    await stock.shop.works()
    [compensate] = [event for event in await stock.shop.sent() if event.event_type == "stock.release"]
    assert await stock.compensate(compensate) is CommandOutcome.DONE
    assert stock.done == ["did", "undid"]


async def test_what_no_event_has_answered_is_not_said_to_be_answered() -> None:
    saga = _waiting()
    stock = Stock(shop=Shop(saga))
    saga_id = await begun(stock.shop, saga)
    await stock.shop.order(saga_id, "compensate")
    await stock.shop.works()
    compensate = (await stock.shop.sent())[-1]
    assert await stock.compensate(compensate) is CommandOutcome.DONE
    assert (compensate.event_type, stock.done) == ("stock.release", [])


async def test_an_action_that_raises_leaves_no_trace() -> None:
    stock = Stock(Event("stock.reserved", {"price": float("nan")}))
    with pytest.raises(InvalidEvent, match="price"):
        await stock.act(command())
    stock.answer = Event("stock.reserved", {})
    assert await stock.act(command()) is CommandOutcome.DONE
    assert stock.done == ["did", "did"]


async def test_an_event_that_is_no_command_is_rejected_permanently() -> None:
    stock = Stock()
    with pytest.raises(Permanent, match="saga_key"):
        await stock.act(command(headers={}))
    with pytest.raises(Permanent, match=r"saga_phase is 'dance'"):
        await stock.act(command("dance"))
    with pytest.raises(Permanent, match="saga_key has a NUL"):
        await stock.act(command(step="a\0b"))
    with pytest.raises(Permanent, match="saga_key is longer"):
        await stock.act(command(step="x" * 1000))
    with pytest.raises(Permanent, match=r"let its handler call compensate\(\)"):
        await stock.act(command("compensation"))
    with pytest.raises(Permanent, match=r"let its handler call execute\(\)"):
        await stock.compensate(command())
    assert stock.done == []


async def test_a_handler_must_return_its_reply() -> None:
    stock = Stock()
    async with stock.shop.store.transaction() as tx:
        with pytest.raises(UsageError, match="returned None; return the reply"):
            await stock.participant.execute(tx, command(), lambda asked, tx: None)
        with pytest.raises(UsageError, match="cannot reject"):
            await stock.participant.compensate(
                tx, command("compensation"), lambda asked, tx: Rejection(NOTHING), nothing=NOTHING
            )


async def test_a_handler_that_hides_an_error_is_reported_when_the_command_comes_again() -> None:
    stock = Stock()
    async with stock.shop.store.transaction() as tx:
        with pytest.raises(UsageError):
            await stock.participant.execute(tx, command(), lambda asked, tx: None)
    with pytest.raises(Permanent, match="committed without a reply"):
        await stock.act(command())


def test_a_participant_needs_a_name() -> None:
    with pytest.raises(UsageError, match="name"):
        Participant("")


# Where replies come in.


def _waiting() -> Saga[Order]:
    saga = order_saga()
    request(saga)
    saga.wait("parcel.collected", name="collected", correlate=lambda event: event.payload.get("order"))
    return saga


async def test_an_event_belongs_to_the_saga_that_correlate_finds_before_the_one_whose_id_it_carries() -> None:
    saga = _waiting()
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    other = str(saga_id_of("shipping", "S-1"))
    assert await shop.arrives(Event("parcel.collected", {"order": "A-7"}, saga_id=other, event_id=uuid4()))
    [message] = (await shop.shown(saga_id)).messages
    assert (message.kind, message.name, message.key, message.body) == (
        MessageKind.REPLY,
        "parcel.collected",
        None,
        b'{"order": "A-7"}',
    )


async def test_an_event_that_correlate_knows_nothing_of_belongs_to_the_saga_whose_id_it_carries() -> None:
    saga = _waiting()
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert await shop.arrives(Event("parcel.collected", {}, saga_id=str(saga_id), event_id=uuid4()))


@pytest.mark.parametrize("saga_id", [None, "A-7", str(SAGA_ID)])
async def test_an_event_of_an_unknown_saga_is_dropped_and_logged(saga_id: str | None) -> None:
    shop = Shop(_waiting())
    event = Event("parcel.collected", {}, saga_id=saga_id, event_id=UUID(int=1))
    assert not await shop.arrives(event)
    [fact] = shop.observer.of(ReplyOfUnknownSaga)
    known = SAGA_ID if saga_id == str(SAGA_ID) else None
    assert (fact.saga_type, fact.saga_id, fact.event_id, fact.event_type) == (
        *("order", known, UUID(int=1)),
        "parcel.collected",
    )


async def test_the_inbox_of_sagas_has_a_consumer_for_each_type_and_a_handler_for_each_reply() -> None:
    old, new = Saga("order", Order, version=1), Saga("order", Order, version=2)
    request(old)
    request(new, reply_topic="answers")
    quiet = Saga("quiet", Order)
    quiet.sleep(seconds=1, name="nap")
    inbox = saga_inbox(SagaRegistry(old, new, quiet))
    assert list(inbox.consumers) == ["saga.order"]
    routes = inbox.consumers["saga.order"]
    topics = {topic for topic, kind in routes.handlers if kind == "stock.reserved"}
    assert topics == {"answers", "events.stock.reserved"}
    assert routes.settings.on_dead_letter is OnDeadLetter.SKIP
