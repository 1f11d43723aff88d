"""A step that is run for each item of a list: frozen, limited, collected in order, compensated in reverse order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from outrider.errors import UsageError
from outrider.saga import Saga, SagaRegistry, StepRejected
from outrider.saga.definition.steps import ITEMS_MAX
from outrider.saga.diagram import mermaid, mermaid_run
from outrider.saga.execution.step_executor import KEY_HEADER
from outrider.saga.model import Phase, SagaRecord, Status, StepStatus
from outrider.saga.planner.actions import Outage
from outrider.testing import SagaHarness
from tests.support.planner_case import Case, call, described, sleep
from tests.support.saga_shop import ONCE, PLAIN

DONE, SKIPPED, REJECTED, STARTED = StepStatus.DONE, StepStatus.SKIPPED, StepStatus.REJECTED, StepStatus.STARTED


@dataclass
class Trip:
    rooms: list[str] = field(default_factory=list)
    bookings: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


def rooms(state: Trip) -> list[str]:
    return state.rooms


class Hotel:
    """Remembers what was booked and cancelled, with the keys."""

    def __init__(self) -> None:
        self.booked: list[str] = []
        self.cancelled: list[tuple[str, Any]] = []
        self.keys: list[str] = []
        self.open = self.open_max = 0

    async def book(self, context: Any) -> str:
        self.keys.append(context.key)
        self.open += 1
        self.open_max = max(self.open, self.open_max)
        await asyncio.sleep(0)
        self.open -= 1
        if context.item == "sold out":
            raise StepRejected("sold out")
        if context.item == "broken":
            raise RuntimeError("broken")
        self.booked.append(context.item)
        return f"B-{context.item}"

    async def cancel(self, context: Any) -> None:
        self.cancelled.append((context.item, context.result))


def call_saga(hotel: Hotel, **options: Any) -> Saga[Trip]:
    trip = Saga("trip", Trip)
    given: dict[str, Any] = {"for_each": rooms, "into": "bookings", "retry": ONCE, **options}
    trip.call(name="book", **given)(hotel.book).compensate()(hotel.cancel)
    trip.call(name="pack", retry=ONCE)(pack)
    return trip


async def pack(context: Any) -> None:
    if not context.state.bookings and context.state.rooms:
        raise StepRejected("nothing is booked")


async def record_of(harness: SagaHarness, saga: Saga[Any]) -> SagaRecord:
    record: SagaRecord = await harness.store.admin.show(saga.new(Trip(), "A-7").saga_id)
    return record


async def test_a_call_is_run_for_each_item_and_the_results_are_collected_in_order() -> None:
    hotel = Hotel()
    harness = SagaHarness(trip := call_saga(hotel))
    saga_id = await harness.start(trip, Trip(["a", "b", "c"]), "A-7")
    seen = await harness.saga("A-7")
    assert (seen.status, seen.state.bookings) == (Status.COMPLETED, ["B-a", "B-b", "B-c"])
    assert seen.steps == {"book": DONE, "book[0]": DONE, "book[1]": DONE, "book[2]": DONE, "pack": DONE}
    assert sorted(hotel.keys) == [f"{saga_id}:book[{index}]" for index in range(3)]


async def test_no_more_items_run_at_a_time_than_the_limit_and_all_of_them_run() -> None:
    hotel = Hotel()
    harness = SagaHarness(trip := call_saga(hotel, parallel_max=3))
    await harness.start(trip, Trip([str(number) for number in range(20)]), "A-7")
    assert (await harness.saga("A-7")).status is Status.COMPLETED
    assert (hotel.open_max, len(hotel.booked)) == (3, 20)


async def test_an_empty_list_is_done_at_once() -> None:
    harness = SagaHarness(trip := call_saga(Hotel()))
    await harness.start(trip, Trip(), "A-7")
    assert (await harness.saga("A-7")).steps == {"book": DONE, "pack": DONE}


async def test_an_item_that_is_rejected_stops_new_ones_and_compensates_the_done_ones_in_reverse_order() -> None:
    hotel = Hotel()
    harness = SagaHarness(trip := call_saga(hotel, parallel_max=2))
    await harness.start(trip, Trip(["a", "b", "c", "sold out", "e", "f", "g"]), "A-7")
    seen = await harness.saga("A-7")
    assert (seen.status, seen.steps["book"], seen.steps["book[3]"]) == (Status.COMPENSATED, REJECTED, REJECTED)
    assert hotel.cancelled == [(item, f"B-{item}") for item in reversed(hotel.booked)]
    assert set("abc") <= set(hotel.booked) <= set("abce")
    assert seen.state.bookings == []


async def test_a_step_after_the_items_compensates_all_of_them() -> None:
    hotel = Hotel()
    harness = SagaHarness(trip := call_saga(hotel, into=None))
    await harness.start(trip, Trip(["a", "b"]), "A-7")
    assert (await harness.saga("A-7")).status is Status.COMPENSATED
    assert hotel.cancelled == [("b", None), ("a", None)]


async def test_an_item_that_fails_waits_for_a_person_and_goes_on_after_retry() -> None:
    hotel = Hotel()
    trip = Saga("trip", Trip)
    trip.call(name="book", for_each=rooms, retry=ONCE, parallel_max=1)(hotel.book)
    harness = SagaHarness(trip)
    await harness.start(trip, Trip(["a", "broken", "c"]), "A-7")
    seen = await harness.saga("A-7")
    assert (seen.status, seen.steps["book[1]"], "book[2]" in seen.steps) == (Status.FAILED, StepStatus.FAILED, False)
    assert seen.current_step == "book", "commands to many sagas choose them by the step that was written"
    await harness.send_command("mark_done", "A-7")
    assert (await harness.saga("A-7")).status is Status.COMPLETED


def test_items_that_have_waited_in_vain_for_their_service_start_after_retry() -> None:
    case = Case(sleep("first"), replace(call("a"), for_each=lambda state: ["x", "y"]))
    case.definition = replace(case.definition, compute=lambda function, stored: function(json.loads(stored)))
    case.outages = {("a", Phase.ACTION): Outage("503", 5)}
    case.advance(seconds=10)
    assert (case.progress("a"), case.progress("a[0]")) == (STARTED, StepStatus.RETRYING)
    case.advance(seconds=86_400)
    assert (case.status, case.progress("a[1]")) == (Status.FAILED, StepStatus.FAILED)
    case.outages = {}
    assert described(case.order("retry")) == ["call a[0] action 1", "call a[1] action 1"]
    case.succeeds("a[0]", "a[1]")
    assert case.status is Status.COMPLETED


async def test_the_list_is_frozen_for_a_new_version_of_the_code() -> None:
    def saga_with(items: Callable[[Trip], list[str]]) -> Saga[Trip]:
        trip = Saga("trip", Trip)
        trip.request("room.book", topic="rooms", reply="room.booked", name="book", for_each=items, parallel_max=1)
        return trip

    trip = saga_with(rooms)
    harness = SagaHarness(trip)
    await harness.start(trip, Trip(["a", "b"]), "A-7")
    harness.sagas = harness.worker.sagas = SagaRegistry(saga_with(lambda state: ["x", "y", "z"]))
    await harness.reply("book[0]")
    await harness.reply("book[1]")
    assert (await harness.saga("A-7")).status is Status.COMPLETED
    assert len(harness.commands) == 2


def request_saga(**options: Any) -> Saga[Trip]:
    trip = Saga("trip", Trip)
    given: dict[str, Any] = {"topic": "rooms", "reply": "room.booked", "rejection": "room.refused", "retry": PLAIN}
    given |= {"compensate": "room.cancel", "compensated": "room.cancelled", "for_each": rooms, **options}
    book = trip.request("room.book", name="book", **given)
    book.payload(lambda state, item: {"room": item})
    if options.get("into") == "bookings":

        @book.on("room.booked")
        def booked(context: Any, reply: Any) -> str:
            return f"{context.item}/{reply.payload['id']}"

    return trip


async def test_a_request_is_sent_for_each_item_and_each_reply_belongs_to_its_item() -> None:
    harness = SagaHarness(trip := request_saga(into="bookings"))
    await harness.start(trip, Trip(["a", "b"]), "A-7")
    assert [event.payload for event in harness.commands] == [{"room": "a"}, {"room": "b"}]
    assert [event.headers[KEY_HEADER].partition(":")[2] for event in harness.commands] == ["book[0]", "book[1]"]
    await harness.reply("book[1]", {"id": 7})
    seen = await harness.saga("A-7")
    assert any("step book has done 1 of 2 items, at most 10 at a time" in reason for reason in seen.reasons)
    await harness.reply("book[0]", {"id": 8})
    assert (await harness.saga("A-7")).state.bookings == ["a/8", "b/7"]
    assert (await harness.saga("A-7")).status is Status.COMPLETED


async def test_without_a_function_the_payload_of_a_reply_is_the_result() -> None:
    harness = SagaHarness(trip := request_saga(into="numbers"))
    await harness.start(trip, Trip(["a", "b"]), "A-7")
    await harness.reply("book[0]", 1)
    await harness.reply("book[1]", 2)
    assert (await harness.saga("A-7")).state.numbers == [1, 2]


async def test_a_rejected_request_cancels_the_other_items_with_their_payload() -> None:
    harness = SagaHarness(trip := request_saga(parallel_max=2))
    await harness.start(trip, Trip(["a", "b", "c"]), "A-7")
    await harness.reply("book[0]", {})
    await harness.reject("book[1]", {"reason": "sold out"})
    await harness.reply("book[2]", {})
    for name in ("book[2]", "book[0]"):
        await harness.reply(name)
    assert (await harness.saga("A-7")).status is Status.COMPENSATED
    assert [event.payload["room"] for event in harness.commands] == ["a", "b", "c", "c", "a"]


async def test_results_that_do_not_fit_the_field_wait_for_a_person() -> None:
    harness = SagaHarness(trip := request_saga(into="numbers"))
    await harness.start(trip, Trip(["a"]), "A-7")
    await harness.reply("book[0]", {"id": 8})
    seen = await harness.saga("A-7")
    assert (seen.status, seen.steps) == (Status.FAILED, {"book": StepStatus.FAILED, "book[0]": DONE})
    assert "the results of its items do not fit: Trip.numbers" in (seen.last_error or "")
    await harness.send_command("retry", "A-7")
    assert (await harness.saga("A-7")).status is Status.FAILED
    await harness.send_command("mark_done", "A-7", numbers=[8])
    assert (await harness.saga("A-7")).state.numbers == [8]


async def test_a_local_step_is_run_for_each_item_and_sees_what_the_item_before_has_written() -> None:
    trip = Saga("trip", Trip)

    @trip.local(for_each=rooms, into="numbers")
    async def create(context: Any, tx: Any) -> int:
        context.state.bookings = [*context.state.bookings, context.item]
        return len(context.item)

    harness = SagaHarness(trip)
    await harness.start(trip, Trip(["a", "bb"]), "A-7")
    assert (await harness.saga("A-7")).state == Trip(["a", "bb"], ["a", "bb"], [1, 2])


async def test_a_condition_decides_before_the_list_is_computed() -> None:
    def broken(state: Trip) -> list[str]:
        raise AssertionError("never computed")

    trip = call_saga(Hotel(), for_each=broken, when=lambda state: False)
    harness = SagaHarness(trip)
    await harness.start(trip, Trip(), "A-7")
    assert (await harness.saga("A-7")).steps == {"book": SKIPPED, "pack": DONE}


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ("text", "returned a str; return a list"),
        (["a", Trip()], "returned the item 1, a Trip that is no JSON value; return its id or a dict"),
        ([(1, 2)], "returned the item 0, a tuple that is no JSON value"),
        (list(range(ITEMS_MAX + 1)), "returned 1001 items, and 1000 are allowed"),
    ],
    ids=["no list", "object", "tuple", "many"],
)
async def test_a_list_that_cannot_be_stored_waits_for_a_person(items: Any, text: str) -> None:
    harness = SagaHarness(trip := call_saga(Hotel(), for_each=lambda state: items))
    await harness.start(trip, Trip(), "A-7")
    seen = await harness.saga("A-7")
    assert (seen.status, seen.steps) == (Status.FAILED, {"book": StepStatus.FAILED})
    assert text in (seen.last_error or "")
    await harness.send_command("compensate", "A-7")
    assert (await harness.saga("A-7")).status is Status.COMPENSATED


async def test_a_result_that_is_no_json_is_a_fault_of_the_code() -> None:
    trip = Saga("trip", Trip)

    @trip.call(for_each=rooms, into="bookings")
    async def book(context: Any) -> Any:
        return Trip()

    harness = SagaHarness(trip)
    await harness.start(trip, Trip(["a"]), "A-7")
    assert "returned a Trip, which is no JSON value" in ((await harness.saga("A-7")).last_error or "")


async def test_diagrams_show_the_list_and_how_many_items_are_done() -> None:
    harness = SagaHarness(trip := request_saga(parallel_max=2))
    assert "for each of rooms, 2 at a time" in mermaid(trip.definition)
    await harness.start(trip, Trip(["a", "b", "c"]), "A-7")
    await harness.reply("book[0]", {})
    picture = mermaid_run(trip.definition, await record_of(harness, trip))
    assert "1 done, 2 started" in picture
    assert "not in this definition" not in picture
    await harness.reject("book[1]", {})
    await harness.reply("book[2]", {})
    picture = mermaid_run(trip.definition, await record_of(harness, trip))
    assert "class u0 started" in picture


async def test_a_changed_list_option_of_a_step_ahead_stops_the_saga() -> None:
    def saga_with(**options: Any) -> Saga[Trip]:
        trip = Saga("trip", Trip)
        trip.sleep(1, name="nap")
        trip.call(name="pack", **options)(pack)
        return trip

    trip = saga_with()
    harness = SagaHarness(trip)
    await harness.start(trip, Trip(["a"]), "A-7")
    harness.sagas = harness.worker.sagas = SagaRegistry(saga_with(for_each=rooms))
    await harness.advance(seconds=1)
    assert "step pack is run for each item now" in ((await harness.saga("A-7")).last_error or "")


async def test_the_compensation_of_items_ahead_may_not_change() -> None:
    trip = request_saga(parallel_max=2)
    harness = SagaHarness(trip)
    await harness.start(trip, Trip(["a", "b"]), "A-7")
    await harness.reply("book[0]", {})
    await harness.reject("book[1]", {})
    assert ("book[0]", Phase.COMPENSATION) in {(e.step, e.phase) for e in (await record_of(harness, trip)).journal}
    harness.sagas = harness.worker.sagas = SagaRegistry(request_saga(compensate="room.free", compensated="room.freed"))
    await harness.advance(seconds=60)
    assert "the compensation of step book has another command" in ((await harness.saga("A-7")).last_error or "")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pivot": True, "for_each": rooms}, "a step with for_each= cannot be the pivot"),
        ({"parallel_max": 3}, "parallel_max= needs for_each="),
        ({"into": "bookings"}, "into= needs for_each="),
        ({"for_each": rooms, "parallel_max": 0}, "parallel_max=0 cannot work; use a whole number from 1 to 1000"),
        (
            {"for_each": rooms, "into": "beds"},
            "into='beds' is no field of the state; there are: rooms, bookings, numbers",
        ),
        ({"for_each": lambda: []}, r"cannot be called with \(state\)"),
        ({"name": "book[0]"}, "ends like that of an item of for_each="),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_the_options_are_checked_where_they_are_written(options: dict[str, Any], text: str) -> None:
    trip = Saga("trip", Trip)
    with pytest.raises(UsageError, match=rf"test_for_each.py:\d+: .*{text}"):
        trip.call(**{"name": "book", **options})(pack)


def test_the_payload_of_an_item_takes_the_item() -> None:
    trip = Saga("trip", Trip)
    book = trip.request("room.book", topic="rooms", reply="room.booked", for_each=rooms)
    with pytest.raises(UsageError, match=r"cannot be called with \(state, item\)"):
        book.payload(lambda state: {})
