"""Definitions of sagas: their contents, and errors with the line to fix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest

from outrider.errors import Permanent, StepRejected, UsageError
from outrider.event import Event
from outrider.retry import RetryPolicy
from outrider.saga.context import Reply, StepContext
from outrider.saga.definition.saga import Saga, SagaRegistry, saga_id_of
from outrider.saga.definition.steps import StepKind
from outrider.saga.state.codec import decode


@dataclass
class Order:
    order_id: str
    amount: int = 0
    reservation: str | None = None


@dataclass
class Tagged:
    tags: set[str] = field(default_factory=set)


async def local(run: StepContext[Order], tx: Any) -> None: ...


async def call(run: StepContext[Order]) -> None: ...


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STOCK: dict[str, Any] = {"command": "stock.reserve", "topic": "stock", "reply": "stock.reserved"}


def order_saga() -> Saga[Order]:
    return Saga("order", Order)


def line(offset: int = 0) -> str:
    """Name the line of the caller, or one so many lines below."""
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


@contextmanager
def rejection(text: str, at: str | None = None) -> Iterator[None]:
    """Expect an error about the line below the `with`, or about another."""
    # The frames between are this generator's and contextlib's.
    below = f"{__file__}:{sys._getframe(2).f_lineno + 1}"
    with pytest.raises(UsageError) as caught:
        yield
    assert str(caught.value).startswith(f"{at or below}: ")
    assert text in str(caught.value)


def test_a_step_comes_after_the_one_written_before_it() -> None:
    order = order_saga()
    order.local(name="create")(local)
    order.call()(call)
    order.sleep(seconds=3600, name="cool_down")
    assert {step.name: step.after for step in order.definition.steps.values()} == {
        "create": (),
        "call": ("create",),
        "cool_down": ("call",),
    }


def test_steps_in_parallel_begin_together_and_what_follows_waits_for_all_of_them() -> None:
    order = order_saga()
    order.local(name="create")(local)
    with order.parallel():
        hotel = order.request(**STOCK, name="hotel")
        order.request(**STOCK, name="car")
        order.request(**STOCK, name="breakfast", after=[hotel])
    order.local(name="confirm")(local)
    steps = order.definition.steps
    assert steps["hotel"].after == steps["car"].after == ("create",)
    assert steps["breakfast"].after == ("hotel",)
    assert steps["confirm"].after == ("car", "breakfast")


def test_a_step_may_come_after_any_others_also_later_ones() -> None:
    order = order_saga()
    order.local(name="create", after="confirm")(local)
    order.local(name="confirm", after=[])(local)
    steps = order.definition.steps
    assert steps["create"].after == ("confirm",)
    assert steps["confirm"].after == ()


def test_an_empty_parallel_block_changes_nothing() -> None:
    order = order_saga()
    order.local(name="create")(local)
    with order.parallel():
        pass
    order.local(name="confirm")(local)
    assert order.definition.steps["confirm"].after == ("create",)


def test_a_request_says_what_it_sends_and_what_answers_it() -> None:
    order = order_saga()
    step = order.request(
        **STOCK,
        rejection="stock.refused",
        compensate="stock.release",
        compensated="stock.released",
        reply_topic="answers",
        timeout_seconds=5,
        retry=RetryPolicy(max_attempts=3),
        compensation_retry=RetryPolicy(max_attempts=4),
    )
    step.payload(lambda state: {"order": state.order_id})
    step.compensation_payload(lambda state: {"reservation": state.reservation})
    kept = order.definition.steps["stock.reserve"]
    assert kept.action.command
    assert kept.compensation
    assert kept.compensation.command
    assert kept.action.command.payload
    assert kept.compensation.command.payload
    assert kept.action.command.payload(Order("A-7")) == {"order": "A-7"}
    assert kept.compensation.command.payload(Order("A-7", reservation="R")) == {"reservation": "R"}
    assert (kept.compensation.command.event_type, kept.compensation.command.topic) == ("stock.release", "stock")
    assert (kept.action.timeout_seconds, kept.compensation.timeout_seconds) == (5, 5)
    assert (kept.action.retry.max_attempts, kept.compensation.retry.max_attempts) == (3, 4)
    assert kept.replies == dict.fromkeys(("stock.reserved", "stock.refused", "stock.released"), "answers")


def test_a_reply_is_taken_by_the_function_of_its_type() -> None:
    order = order_saga()

    @order.request(**STOCK).on("stock.reserved")
    def reserved(run: StepContext[Order], reply: Reply) -> None:
        run.state.reservation = reply.payload["reservation"]

    run = StepContext(Order("A-7"), UUID(int=1), "1:stock.reserve", 1, "A-7")
    order.definition.steps["stock.reserve"].reply_functions["stock.reserved"](
        run, Reply("stock.reserved", {"reservation": "R"})
    )
    assert run.state.reservation == "R"


def test_a_wait_keeps_how_its_event_finds_the_saga() -> None:
    order = order_saga()
    order.wait("parcel.collected", correlate=lambda event: event.key, timeout_seconds=86400, topic="parcels")
    step = order.definition.steps["parcel.collected"]
    assert step.correlate
    assert step.correlate(Event("parcel.collected", {}, key="A-7")) == "A-7"
    assert (step.kind, step.replies, step.action.timeout_seconds) == (
        StepKind.WAIT,
        {"parcel.collected": "parcels"},
        86400,
    )


def test_compensating_a_call_has_the_time_of_its_action_unless_it_says_otherwise() -> None:
    order = order_saga()
    order.call(name="pay", timeout_seconds=7)(call).compensate()(call)
    order.call(name="ship", timeout_seconds=7)(call).compensate(timeout_seconds=9)(call)
    compensations = [step.compensation for step in order.definition.steps.values()]
    assert [compensate.timeout_seconds for compensate in compensations if compensate] == [7, 9]


async def test_a_step_can_be_called_like_its_function() -> None:
    order = order_saga()

    @order.call()
    async def charge(run: StepContext[Order]) -> None:
        run.state.amount += 1

    run = StepContext(Order("A-7"), UUID(int=1), "1:charge", 1, "A-7")
    await charge(run)
    assert run.state.amount == 1


def test_a_definition_is_made_once_and_anew_when_a_step_is_added() -> None:
    order = order_saga()
    step = order.local(name="create")(local)
    first = order.definition
    assert order.definition is first
    step.compensate()(local)
    assert first.steps["create"].compensation is None
    assert order.definition.steps["create"].compensation


def test_the_same_type_and_correlation_id_are_the_same_saga() -> None:
    order = Saga("order", Order, version=3)
    order.local(name="create")(local)
    new = order.new(Order("A-7", 12), "A-7", traceparent=TRACE)
    assert new.saga_id == saga_id_of("order", "A-7") == UUID("18c147b0-5392-5c4a-996b-330d304e2d64")
    assert new[1:4] == ("order", 3, "A-7")
    assert decode(Order, new.state) == Order("A-7", 12)
    assert new.traceparent == TRACE
    assert len({saga_id_of("order", "A-7"), saga_id_of("order", "A-8"), saga_id_of("orde", "rA-7")}) == 3


def test_a_saga_is_started_with_its_own_state_and_a_correlation_id() -> None:
    order = order_saga()
    order.local(name="create")(local)
    with pytest.raises(UsageError, match="keeps a Order, not a Tagged"):
        order.new(Tagged(), "A-7")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="correlation id"):
        order.new(Order("A-7"), "")


def test_staged_events_get_the_id_of_the_saga_unless_they_have_one() -> None:
    run = StepContext(Order("A-7"), UUID(int=7), "7:create", 1, "A-7")
    run.stage(Event("order.placed", {}), Event("order.seen", {}, saga_id="another"))
    assert [event.saga_id for event in run.staged] == [str(UUID(int=7)), "another"]


def test_a_rejection_is_permanent() -> None:
    assert issubclass(StepRejected, Permanent)


def test_sagas_are_found_by_type_and_version() -> None:
    first, second = Saga("order", Order, version=1), Saga("order", Order, version=2)
    for saga in (first, second):
        saga.local(name="create")(local)
    sagas = SagaRegistry(first, second)
    assert sagas.find("order", 2) is second
    assert sagas.find("order", 3) is None
    assert sagas.versions == {("order", 1), ("order", 2)}
    assert list(SagaRegistry.of([first, second])) == list(sagas) == [first, second]
    assert list(SagaRegistry.of(first)) == [first]
    assert SagaRegistry.of(sagas) is sagas


def test_two_sagas_of_one_type_and_version_cannot_run_together() -> None:
    first = order_saga()
    first.local(name="create")(local)
    second = Saga("order", Order)
    at = line(-1)
    second.local(name="create")(local)
    with rejection("there is a saga order version 1 already", at):
        SagaRegistry(first, second)


def test_there_must_be_sagas_to_run() -> None:
    with pytest.raises(UsageError, match="there are no sagas"):
        SagaRegistry()
    with pytest.raises(UsageError, match="'order' is no saga"):
        SagaRegistry("order")  # type: ignore[arg-type]


def test_a_saga_without_steps_cannot_run() -> None:
    order = Saga("order", Order)
    at = line(-1)
    with rejection("has no steps", at):
        SagaRegistry(order)


def test_a_name_is_used_once() -> None:
    order = order_saga()
    order.local(name="create")(local)
    before = line(-1)
    with rejection(f"there is a step create already, at {before}"):
        order.local(name="create")(local)


def test_after_names_steps() -> None:
    order = order_saga()
    order.local(name="create", after=["creat"])(local)
    at = line(-1)
    with rejection("create comes after 'creat', which is no step; there are: create", at):
        order.check()
    with rejection("is no step"):
        order.local(name="confirm", after=[local])(local)  # type: ignore[list-item]
    with rejection("after=5 is no step"):
        order.local(name="confirm", after=5)(local)  # type: ignore[arg-type]


def test_steps_do_not_wait_for_each_other_in_a_circle() -> None:
    order = order_saga()
    order.local(name="create", after=["confirm"])(local)
    first = line(-1)
    circle = "confirm waits for create waits for confirm, so none of them can begin"
    with rejection(f"{circle}; take one of these names out of an after=[…] (create at {first}"):
        order.local(name="confirm", after=["create"])(local)


def test_a_cycle_is_named_in_the_order_of_waiting() -> None:
    order = order_saga()
    order.local(name="before", after=[])(local)
    order.local(name="a", after=["before", "c"])(local)
    order.local(name="b", after=["a"])(local)
    with rejection("c waits for b waits for a waits for c, so"):
        order.local(name="c", after=["b"])(local)


def test_a_step_does_not_wait_for_itself() -> None:
    with rejection("create waits for create, so"):
        order_saga().local(name="create", after=["create"])(local)


def test_there_is_one_pivot() -> None:
    order = order_saga()
    order.call(name="charge", pivot=True)(call)
    with rejection("ship is a second pivot"):
        order.call(name="ship", pivot=True)(call)


def test_every_step_is_before_or_after_the_pivot() -> None:
    order = order_saga()
    order.call(name="charge", pivot=True)(call)
    with rejection("notify is neither before nor after the pivot charge"):
        order.call(name="notify", after=[])(call)


def test_a_step_beside_a_pivot_that_is_written_later_is_named() -> None:
    order = order_saga()
    with order.parallel():
        order.call(name="notify")(call)
        at = line(-1)
        with rejection("notify is neither before nor after the pivot", at):
            order.call(name="charge", pivot=True)(call)


def test_the_pivot_has_no_compensation() -> None:
    order = order_saga()
    charge = order.call(name="charge", pivot=True)(call)
    with rejection("charge is the pivot and has a compensation", line(-1)):
        charge.compensate()(call)


def test_nothing_is_compensated_after_the_pivot() -> None:
    order = order_saga()
    order.call(name="charge", pivot=True)(call)
    order.local(name="log")(local)
    ship = order.call(name="ship")(call)
    with rejection("ship has a compensation and comes after the pivot charge", line(-1)):
        ship.compensate()(call)
    with rejection("stock.reserve has a compensation and comes after the pivot"):
        order.request(**STOCK, compensate="stock.release", compensated="stock.released")


def test_a_pivot_that_is_named_before_it_is_written_is_seen_when_it_is() -> None:
    order = order_saga()
    order.call(name="ship", after=["charge"])(call).compensate()(call)
    at = line(-1)
    with rejection("ship has a compensation and comes after the pivot charge", at):
        order.call(name="charge", pivot=True, after=[])(call)


def test_a_reply_must_be_declared_by_its_step() -> None:
    order = order_saga()
    step = order.request(**STOCK)
    declared = line(-1)
    with rejection(f"stock.reserve ({declared}) declares no reply 'stock.reservd'; name one of: stock.reserved"):
        step.on("stock.reservd")(lambda run, reply: None)
    step.on("stock.reserved")(lambda run, reply: None)
    with rejection("takes 'stock.reserved' already"):
        step.on("stock.reserved")(lambda run, reply: None)


def test_two_waits_for_one_type_cannot_wait_at_the_same_time() -> None:
    order = order_saga()
    with order.parallel():
        order.wait("parcel.collected", name="first")
        with rejection("second and first"):
            order.wait("parcel.collected", name="second")


def test_two_waits_for_one_type_may_follow_each_other() -> None:
    order = order_saga()
    order.wait("parcel.collected", name="first")
    order.wait("parcel.collected", name="second")
    order.check()


def test_two_requests_may_be_answered_by_one_type() -> None:
    order = order_saga()
    with order.parallel():
        order.request(**STOCK, name="hotel")
        order.request(**STOCK, name="car")
    order.check()


def test_the_compensation_of_a_request_and_its_reply_come_together() -> None:
    order = order_saga()
    with rejection("has compensate= without compensated="):
        order.request(**STOCK, compensate="stock.release")
    with rejection("has compensated= without compensate="):
        order.request(**STOCK, compensated="stock.released")
    with rejection("has compensation_retry= without compensate="):
        order.request(**STOCK, compensation_retry=RetryPolicy())
    step = order.request(**STOCK)
    with rejection("has no compensation"):
        step.compensation_payload(lambda state: {})


def test_replies_to_one_step_are_of_different_types() -> None:
    order = order_saga()
    with rejection("reply and rejection are both 'stock.reserved'"):
        order.request(**STOCK, rejection="stock.reserved")
    with rejection("compensated and reply are both 'stock.reserved'"):
        order.request(**STOCK, compensate="stock.release", compensated="stock.reserved")
    with rejection("the command and compensate are both 'stock.reserve'"):
        order.request(**STOCK, compensate="stock.reserve", compensated="stock.released")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "5", True, None, 1e12, 10**30])
def test_a_time_is_a_number_above_nothing(seconds: Any) -> None:
    order = order_saga()
    with rejection(f"timeout_seconds={seconds!r} cannot work"):
        order.call(timeout_seconds=seconds)(call)
    with rejection(f"timeout_seconds={seconds!r} cannot work"):
        order.request(**STOCK, timeout_seconds=seconds)
    with rejection(f"seconds={seconds!r} cannot work"):
        order.sleep(seconds=seconds, name="pause")


def test_a_wait_has_a_time_that_works_or_none() -> None:
    order = order_saga()
    order.wait("parcel.collected")
    with rejection("timeout_seconds=0 cannot work"):
        order.wait("parcel.returned", timeout_seconds=0)


def test_compensating_a_call_has_a_time_that_works() -> None:
    charge = order_saga().call(name="charge")(call)
    with rejection("timeout_seconds=0 cannot work"):
        charge.compensate(timeout_seconds=0)(call)


def test_types_and_topics_are_names() -> None:
    order = order_saga()
    with rejection("'' cannot name a topic"):
        order.request("stock.reserve", topic="", reply="stock.reserved")
    with rejection("'' cannot name an event"):
        order.request("stock.reserve", topic="stock", reply="")
    with rejection("' ' cannot name an event"):
        order.request(**STOCK, compensate=" ", compensated="stock.released")
    with rejection("' ' cannot name an event"):
        order.wait(" ")
    with rejection("'' cannot name a topic"):
        order.wait("parcel.collected", topic="")


def test_a_budget_is_a_policy() -> None:
    with rejection("retry=5 is no policy"):
        order_saga().local(retry=5)(local)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [" create", "a\nb", "x" * 201, "\0"])
def test_a_name_can_be_stored_and_read(name: str) -> None:
    with rejection("cannot name a step"):
        order_saga().local(name=name)(local)
    with rejection("cannot name a saga"):
        Saga(name, Order)


@pytest.mark.parametrize("version", [0, -1, True, "1", 2**31])
def test_versions_count_from_one(version: Any) -> None:
    with rejection(f"version={version!r} cannot work"):
        Saga("order", Order, version=version)


def test_a_state_that_cannot_be_stored_is_rejected_with_its_field() -> None:
    with rejection("Tagged.tags: the type set[str] cannot be stored"):
        Saga("order", Tagged)
    with rejection("int: it is neither a dataclass nor a pydantic model"):
        Saga("order", int)


def test_a_function_takes_what_it_is_given() -> None:
    order = order_saga()
    step = order.request(**STOCK)
    with rejection("cannot be called with (context, tx)"):
        order.local(name="create")(call)  # type: ignore[arg-type]
    with rejection("cannot be called with (context)"):
        order.call(name="charge")(local)  # type: ignore[arg-type]
    with rejection("cannot be called with (state)"):
        step.payload(lambda: {})  # type: ignore[arg-type]
    with rejection("cannot be called with (event)"):
        order.wait("parcel.collected", correlate=lambda: "A-7")  # type: ignore[misc, arg-type]
    with rejection("is not a function"):
        order.local(name="create")("create")  # type: ignore[arg-type]


def test_a_call_gives_way_to_other_sagas_and_a_reply_is_taken_at_once() -> None:
    order = order_saga()

    def blocking(run: StepContext[Order]) -> None: ...

    with rejection("would stop all other sagas"):
        order.call()(blocking)
    with rejection("is async, and may only compute"):
        order.wait("parcel.collected", correlate=call)  # type: ignore[arg-type]
    with rejection("is async, and may only compute"):
        order.request(**STOCK).on("stock.reserved")(local)  # type: ignore[arg-type]


def test_a_step_is_compensated_in_one_way_and_carries_one_payload() -> None:
    order = order_saga()
    create, step = order.local(name="create")(local), order.request(**STOCK)
    create.compensate()(local)
    with rejection("create has a compensation already"):
        create.compensate()(local)
    step.payload(lambda state: {})
    with rejection("stock.reserve has a payload already"):
        step.payload(lambda state: {})


def test_parallel_blocks_are_not_nested() -> None:
    order = order_saga()
    with order.parallel(), rejection("parallel() inside parallel()", line()), order.parallel():
        pass


def test_a_rejected_step_leaves_the_saga_as_it_was() -> None:
    order = order_saga()
    order.call(name="charge", pivot=True)(call)
    before = order.definition
    for write in rejected_writings(order):
        with pytest.raises(UsageError):
            write()
    assert order.definition == before
    order.local(name="confirm")(local)
    assert order.definition.steps["confirm"].after == ("charge",)


def rejected_writings(order: Saga[Order]) -> list[Callable[[], object]]:
    return [
        lambda: order.call(name="charge")(call),
        lambda: order.call(name="ship", pivot=True)(call),
        lambda: order.request(**STOCK, compensate="stock.release", compensated="stock.released"),
    ]
