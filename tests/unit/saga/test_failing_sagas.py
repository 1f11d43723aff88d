"""Turns that cannot be computed or saved, and code that breaks the rules: a saga stops, and records the reason."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

import outrider
from outrider import Event, RetryPolicy
from outrider.errors import TransactionLost, UsageError
from outrider.saga import StepRejected
from outrider.saga.definition.steps import Definition
from outrider.saga.execution import runner, turn
from outrider.saga.execution.runner import FAILED_TURNS_MAX, ROLLED_BACK_MAX
from outrider.saga.model import SagaChange, SagaRecord, Status, StepStatus
from outrider.saga.planner.actions import Input, Plan
from outrider.saga.planner.planner import advance
from outrider.telemetry.events import (
    SagaNeedsAttention,
    SagaReleased,
    SagaStepFailed,
    SagaStepRaised,
    SagaStepRolledBack,
    SagaWorkerUnavailable,
)
from tests.support.saga_shop import LEASE_SECONDS, ONCE, TWICE, Order, Shop, begun, local, order_saga, request

DONE, FAILED, REJECTED = StepStatus.DONE, StepStatus.FAILED, StepStatus.REJECTED


async def _stopped(shop: Shop, saga_id: UUID) -> str:
    """Return why a saga has stopped: it is failed and released, and the reason was logged once."""
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, instance.needs_attention, instance.owner) == (Status.FAILED, True, None)
    assert len(shop.observer.of(SagaNeedsAttention)) == 1
    assert instance.last_error is not None
    return instance.last_error


class Evil(dict[str, Any]):
    """A payload that raises when it is read."""

    def items(self) -> Any:
        raise RuntimeError("evil")


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (Evil(a=1), "RuntimeError: evil (tests/unit/saga/test_failing_sagas.py:"),
        ({"price": float("nan")}, "payload.price: nan is not JSON; send null or a number"),
    ],
    ids=["chokes", "rejected"],
)
@pytest.mark.parametrize("kind", ["local", "call", "reply", "command"])
async def test_an_event_that_cannot_be_staged_fails_the_step_that_wanted_it_at_once(
    kind: str, payload: dict[str, Any], said: str
) -> None:
    saga = order_saga()

    def stage_badly(run: Any, *_: Any) -> None:
        run.stage(Event("order.changed", payload))

    async def stage_badly_later(run: Any) -> None:
        stage_badly(run)

    with saga.parallel():
        if kind == "local":
            saga.local(name="it")(stage_badly)
        elif kind == "call":
            saga.call(name="it")(stage_badly_later)
        elif kind == "reply":
            request(saga, "it").on("stock.reserved")(stage_badly)
        else:
            request(saga, "it").payload(lambda state: payload)
        request(
            saga, "other", command="car.reserve", reply="car.reserved", rejection=None, compensate="x", compensated="y"
        )
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    for command in await shop.sent():
        await shop.answer(command, "stock.reserved" if command.event_type == "stock.reserve" else "car.reserved")
        await shop.works()
    error = await _stopped(shop, saga_id)
    answered = "its reply cannot be applied: " if kind == "reply" else ""
    assert error.startswith(f"{answered}{said}")
    assert "; staged for " in error
    assert (await shop.shown(saga_id)).instance.current_step == "it"
    assert (await shop.progress(saga_id, "it")) == (FAILED, 1)
    assert (await shop.progress(saga_id, "other")) == (DONE, 1)
    assert not shop.observer.of(SagaReleased)


async def test_a_turn_that_cannot_be_computed_stops_its_saga_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(definition: Definition, record: SagaRecord, inputs: Sequence[Input], *more: Any, **named: Any) -> Plan:
        if any(message.name == "poison" for message in record.messages):
            raise KeyError("a bug")
        return advance(definition, record, inputs, *more, **named)

    monkeypatch.setattr(turn, "advance", broken)
    saga = order_saga()
    request(saga)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    await shop.order(saga_id, "poison")
    await shop.works()
    error = await _stopped(shop, saga_id)
    assert error.startswith("no turn of it can be computed")
    assert "KeyError: 'a bug' (tests/unit/saga/test_failing_sagas.py:" in error
    assert "operator poison" in await shop.audit_log(saga_id)
    assert (await shop.shown(saga_id)).messages == ()
    # The journal is as it was, so a person can let it go on.
    await shop.order(saga_id, "retry")
    await shop.works()
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_a_turn_that_can_never_be_saved_stops_its_saga_after_some_tries() -> None:
    saga = order_saga()
    request(saga)
    shop = Shop(saga)

    def broken(turn: SagaChange) -> None:
        if turn.instance.status is not Status.FAILED:
            raise outrider.Permanent("a value that no column takes")

    shop.store.saving = broken
    saga_id = await begun(shop, saga)
    for tries in range(1, FAILED_TURNS_MAX):
        assert len(shop.observer.of(SagaReleased)) == tries
        await shop.passes(LEASE_SECONDS)
    await shop.passes(LEASE_SECONDS)
    assert len(shop.observer.of(SagaReleased)) == FAILED_TURNS_MAX
    assert "a value that no column takes" in await _stopped(shop, saga_id)


@pytest.mark.parametrize("headers", [None, [1]])
async def test_an_event_without_headers_that_are_a_mapping_fails_its_step(headers: Any) -> None:
    saga = order_saga()

    @saga.local()
    async def create(run: Any, tx: Any) -> None:
        run.stage(Event("order.created", {}, headers=headers))

    shop = Shop(saga)
    new = saga.new(Order("A-7"), "A-7", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    async with shop.store.transaction() as tx:
        await shop.store.start(tx, new)
    await shop.works()
    assert (await _stopped(shop, new.saga_id)).startswith("headers: ")


async def test_a_local_step_that_ends_its_transaction_is_never_repeated_and_nothing_is_compensated() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log, "a")

    @saga.local()
    async def ends(run: Any, tx: Any) -> None:
        log.append("ends")
        tx.commit()

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert re.search(r"ends \(.*test_failing_sagas\.py:\d+\) ended the transaction", await _stopped(shop, saga_id))
    assert log == ["a", "ends"]


def test_a_step_whose_function_has_a_yield_is_rejected_when_it_is_written() -> None:
    saga = order_saga()

    def create(run: Any, tx: Any) -> Any:
        yield

    with pytest.raises(UsageError, match=r"test_failing_sagas\.py:\d+: .*create has a yield"):
        saga.local()(create)


@pytest.mark.parametrize("error", [SystemExit("bye"), KeyboardInterrupt(), BaseExceptionGroup("all", [SystemExit(1)])])
@pytest.mark.parametrize("kind", ["local", "call", "reply", "payload"])
async def test_an_exit_is_an_error_of_its_step_like_any_other(kind: str, error: BaseException) -> None:
    saga = order_saga()

    def leave(*_: Any) -> Any:
        raise error

    async def leave_later(run: Any) -> None:
        leave()

    if kind == "local":
        saga.local(name="it", retry=ONCE)(leave)
    elif kind == "call":
        saga.call(name="it", retry=ONCE)(leave_later)
    elif kind == "reply":
        request(saga, "it", retry=ONCE).on("stock.reserved")(leave)
    else:
        request(saga, "it", retry=ONCE).payload(leave)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    for command in await shop.sent():
        await shop.answer(command, "stock.reserved")
        await shop.works()
    [fact] = shop.observer.of(SagaStepFailed)
    assert type(error).__name__ in fact.error
    assert await shop.status(saga_id) is (Status.COMPENSATED if kind == "local" else Status.FAILED)


async def test_a_local_step_that_takes_too_long_is_rolled_back_and_counts_an_attempt() -> None:
    saga = order_saga()

    @saga.local(timeout_seconds=0.01, retry=TWICE)
    async def create(run: Any, tx: Any) -> None:
        await outrider.stage(tx, Event("order.created", {"attempt": run.attempt}))
        if run.attempt == 1:
            await asyncio.Event().wait()

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert (await shop.shown(saga_id)).instance.last_error == "no result within 0.01 s"
    await shop.passes(5)
    assert await shop.status(saga_id) is Status.COMPLETED
    assert [event.payload for event in await shop.sent()] == [{"attempt": 2}]


async def test_a_transaction_that_is_lost_under_a_local_step_costs_an_attempt_only_if_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "PAUSES", RetryPolicy(base_seconds=0.001, cap_seconds=0.001))
    saga, tries = order_saga(), list[int]()

    @saga.local(retry=TWICE)
    async def create(run: Any, tx: Any) -> None:
        tries.append(run.attempt)
        if len(tries) <= ROLLED_BACK_MAX + 1:
            raise TransactionLost("the connection is gone")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert tries == [1] * ROLLED_BACK_MAX
    error = (await shop.shown(saga_id)).instance.last_error
    assert (
        error
        == f"the store has failed under it {ROLLED_BACK_MAX} times in a row, the last time so: the connection is gone"
    )
    await shop.passes(5)
    assert tries == [1] * ROLLED_BACK_MAX + [2, 2]
    assert await shop.progress(saga_id, "create") == (DONE, 2)
    assert [fact.times for fact in shop.observer.of(SagaStepRolledBack)] == [*range(1, ROLLED_BACK_MAX + 1), 1]
    assert not shop.observer.of(SagaWorkerUnavailable)


@pytest.mark.parametrize("kind", ["local", "call"])
@pytest.mark.parametrize(
    ("stage", "error"),
    [
        (
            lambda run: run.stage({"type": "order.created"}),
            r"event: a dict is not an Event; write context\.stage\(Event\(",
        ),
        (lambda run: run.stage([Event("order.created", {})]), "a list is not an Event"),
        (lambda run: _awaited(run.stage(Event("order.created", {}))), r"write context\.stage\(…\) without await"),
    ],
)
async def test_what_is_staged_wrongly_fails_its_step_at_once_with_the_fix(kind: str, stage: Any, error: str) -> None:
    saga, tries = order_saga(), list[int]()

    async def it(run: Any, *_: Any) -> None:
        tries.append(1)
        await (stage(run) or asyncio.sleep(0))

    saga.local(name="it")(it) if kind == "local" else saga.call(name="it")(it)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert re.search(error, await _stopped(shop, saga_id))
    assert tries == [1]


async def _awaited(something: Any) -> None:
    await something


async def test_staging_returns_nothing_that_one_must_keep() -> None:
    saga = order_saga()

    @saga.call()
    async def charge(run: Any) -> None:
        run.stage(Event("order.charged", {}), Event("order.paid", {}))

    shop = Shop(saga)
    await begun(shop, saga)
    assert {event.event_type for event in await shop.sent()} == {"order.charged", "order.paid"}


async def test_the_traceback_of_a_step_is_logged_at_debug_level() -> None:
    saga = order_saga()

    @saga.call(retry=TWICE)
    async def charge(run: Any) -> None:
        if run.attempt == 1:
            raise RuntimeError("not today")
        raise StepRejected("the card was declined")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    await shop.passes(5)
    [fact] = shop.observer.of(SagaStepRaised)
    assert (fact.level, fact.step) == ("debug", "charge")
    assert 'raise RuntimeError("not today")' in fact.traceback
    # A rejection is the author's decision: no error, and without a line of code.
    assert next(e.error for e in (await shop.shown(saga_id)).journal) == "the card was declined"


async def test_an_error_whose_text_cannot_be_made_is_still_reported() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    saga = order_saga()

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        raise Mute

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert "Mute: (its text cannot be read: RuntimeError)" in await _stopped(shop, saga_id)


async def test_a_group_of_errors_names_the_first_of_them_and_its_line() -> None:
    saga = order_saga()

    async def breaks() -> None:
        raise ValueError("inner")

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(breaks())

    shop = Shop(saga)
    error = await _stopped(shop, await begun(shop, saga))
    assert re.search(r"the first of them ValueError: inner \(tests/unit/saga/test_failing_sagas\.py:\d+ in ", error)


async def test_the_payload_of_a_compensation_is_named_when_it_raises() -> None:
    saga = order_saga()
    reserve = request(saga, compensation_retry=ONCE)

    @reserve.compensation_payload
    def what_to_release(state: Order) -> dict[str, str]:
        raise KeyError("reservation")

    @saga.call()
    async def charge(run: Any) -> None:
        raise StepRejected("the card was declined")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert (await _stopped(shop, saga_id)).startswith("compensation_payload: KeyError: 'reservation' (tests/unit/")


def test_a_compensation_whose_function_has_a_yield_is_rejected_too() -> None:
    saga = order_saga()

    @saga.local()
    async def create(run: Any, tx: Any) -> None: ...

    async def cancel(run: Any, tx: Any) -> Any:
        yield

    with pytest.raises(UsageError, match=r"test_failing_sagas\.py:\d+: .*cancel has a yield"):
        create.compensate()(cancel)
