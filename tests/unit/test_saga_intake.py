"""Where replies come in: whose they are, that junk holds nobody up, and that one event is taken once."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from outrider import Event
from outrider.app import saga_inbox
from outrider.errors import Permanent
from outrider.saga import Saga, SagaRegistry
from outrider.telemetry.events import ReplyOfUnknownSaga, ReplyWithoutSaga
from tests.unit.saga_shop import Order, Shop, begun, order_saga, request

PAID = Event("rate.paid", {"rate": 1}, event_id=UUID(int=1))


def _rent() -> Saga[Order]:
    """Wait for two rates, one after the other, and count what was paid."""
    saga = Saga("rent", Order)
    for name in ("first", "second"):

        @saga.wait("rate.paid", name=name).on("rate.paid")
        def paid(run: Any, reply: Any) -> None:
            run.state.amount += reply.payload["rate"]

    return saga


async def test_an_event_reaches_its_saga_only_through_the_consumer_of_its_own_type() -> None:
    rent, audit = _rent(), Saga("audit", Order)
    audit.wait("rate.paid", name="paid")
    shop = Shop(rent, audit)
    saga_id = await begun(shop, rent)
    event = Event("rate.paid", {"rate": 1}, saga_id=str(saga_id), event_id=uuid4())
    assert not await shop.arrives(event, saga_type="audit")
    assert await shop.arrives(event, saga_type="rent")
    assert [fact.saga_type for fact in shop.observer.of(ReplyOfUnknownSaga)] == ["audit"]


async def test_one_event_is_taken_by_one_step_however_often_it_is_delivered() -> None:
    rent = _rent()
    shop = Shop(rent)
    saga_id = await begun(shop, rent)
    event = Event("rate.paid", {"rate": 1}, saga_id=str(saga_id), event_id=uuid4())
    for _ in range(2):
        assert await shop.arrives(event, saga_type="rent")
        await shop.works()
    shown = await shop.shown(saga_id)
    assert ((await shop.state(saga_id))["amount"], shown.instance.current_step, shown.messages) == (1, "second", ())
    assert (await shop.trail(saga_id))[-1] == "reply dropped"


@pytest.mark.parametrize(
    ("key", "wrong"), [("a\0b", "NUL"), ("\ud800", "half a character"), ("x" * 1001, "longer than 1000 bytes")]
)
async def test_a_reply_whose_key_no_store_can_keep_is_refused_for_good(key: str, wrong: str) -> None:
    saga = order_saga()
    request(saga)
    shop = Shop(saga)
    with pytest.raises(Permanent, match=f"saga_key .*{wrong}"):
        await shop.arrives(Event("stock.reserved", {}, saga_id=str(uuid4()), headers={"saga_key": key}))


async def test_a_reply_whose_payload_no_store_can_keep_is_refused_for_good() -> None:
    saga = order_saga()
    request(saga)
    shop = Shop(saga)
    with pytest.raises(Permanent, match="not JSON"):
        await shop.arrives(Event("stock.reserved", {"price": float("nan")}, saga_id=str(uuid4())))


async def test_a_correlate_that_raises_refuses_the_event_for_good_and_is_named_with_its_line() -> None:
    def order_of(event: Event) -> str:
        return str(event.payload["order"])

    saga = order_saga()
    saga.wait("parcel.collected", correlate=order_of)
    with pytest.raises(Permanent, match=r"order_of raised KeyError: 'order' \(.*test_saga_intake.py:\d+ in order_of\)"):
        await Shop(saga).arrives(Event("parcel.collected", {}))


@pytest.mark.parametrize("saga_id", [None, "A-7"])
async def test_a_reply_that_names_no_saga_is_told_with_the_remedy(saga_id: str | None) -> None:
    saga = order_saga()
    request(saga)
    saga.wait("parcel.collected")
    shop = Shop(saga)
    for event_type in ("stock.reserved", "parcel.collected"):
        assert not await shop.arrives(Event(event_type, {}, saga_id=saga_id))
    asked, waited = shop.observer.of(ReplyWithoutSaga)
    assert "copy saga_id and saga_key from the command, or use Participant" in asked.remedy
    assert "correlate" in waited.remedy
    assert asked.level == "warning"


async def test_an_event_that_correlate_finds_no_saga_for_is_told_only_to_who_looks_closely() -> None:
    saga = order_saga()
    saga.wait("parcel.collected", correlate=lambda event: event.payload.get("order"))
    shop = Shop(saga)
    assert not await shop.arrives(Event("parcel.collected", {}))
    assert not await shop.arrives(Event("parcel.collected", {"order": "B-1"}))
    assert [fact.level for fact in shop.observer.of(ReplyOfUnknownSaga)] == ["debug", "debug"]
    assert shop.observer.of(ReplyWithoutSaga) == []


def test_sagas_with_a_name_have_consumers_of_their_own() -> None:
    saga = order_saga()
    request(saga)
    assert list(saga_inbox(SagaRegistry(saga)).consumers) == ["saga.order"]
    assert list(saga_inbox(SagaRegistry(saga, name="shop")).consumers) == ["shop.saga.order"]
