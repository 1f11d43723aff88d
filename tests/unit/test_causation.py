"""Causation: the headers that an event staged in a handler continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from outrider import Event, Inbox
from outrider.causation import continue_headers, handling
from outrider.saga import Saga
from outrider.saga.definition.saga import saga_id_of
from outrider.stores.memory import MemoryInbox, MemorySagas, MemoryStore
from outrider.testing.harness import delivery

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-00"


@dataclass
class Order:
    """The state of a saga."""

    order_id: str


def continued(**headers: str) -> str:
    with handling([Event("order.placed", {}, event_id=UUID(int=7), headers={"correlation_id": "c", **headers})]):
        return continue_headers('{"causation_id": "click-3"}')


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"traceparent": PARENT}, f'{{"traceparent": "{PARENT}", '),
        ({"traceparent": PARENT, "trace_id": "f" * 32}, f'{{"traceparent": "{PARENT}", '),
        ({"trace_id": TRACE}, f'{{"trace_id": "{TRACE}", '),
        ({"tracestate": "shop=1"}, "{"),
        ({"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}, "{"),
        ({"traceparent": PARENT.upper()}, "{"),
        ({"trace_id": "0" * 32}, "{"),
    ],
)
def test_a_trace_is_continued_as_it_is_and_an_invalid_one_is_not(headers: dict[str, str], expected: str) -> None:
    assert continued(**headers) == expected + '"correlation_id": "c", "causation_id": "click-3"}'


@pytest.mark.parametrize("value", ["a\nb", "a\0b", "\ud800", "x" * 1001, ""])
def test_a_correlation_that_no_event_could_carry_counts_as_missing(value: str) -> None:
    assert f'"correlation_id": "{UUID(int=7)}"' in continued(correlation_id=value)


def test_nothing_is_continued_outside_of_a_handler() -> None:
    assert continued(traceparent=PARENT)
    assert continue_headers("{}") == "{}"


async def test_a_saga_started_in_a_handler_continues_the_trace_of_the_handled_event() -> None:
    store = MemoryStore()
    order = Saga("order", Order)
    order.wait("parcel.collected")

    async def start(event: Event, tx: Any) -> None:
        await order.start(tx, Order("A-7"), correlation_id="A-7")
        await order.start(tx, Order("A-8"), correlation_id="A-8", traceparent=PARENT.replace("4", "5"))

    await Inbox(MemoryInbox(store)).process(delivery(1, traceparent=PARENT), start, consumer="orders")
    sagas = MemorySagas(store)
    records = [await sagas.admin.show(saga_id_of("order", name)) for name in ("A-7", "A-8")]
    assert [record and record.instance.traceparent for record in records] == [PARENT, PARENT.replace("4", "5")]
