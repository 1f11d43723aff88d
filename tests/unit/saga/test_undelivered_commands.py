"""The rules of commands that have not left the outbox: an outage counts no attempt, and a dead letter is reported."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from outrider.saga.explain import explain
from outrider.saga.model import Phase, Status, StepStatus, Undelivered
from outrider.saga.planner.planner import Plan, overdue
from tests.support.planner_case import Case, described, request, wait
from tests.support.saga_shop import ONCE, TWICE, Shop, begun, order_saga
from tests.support.saga_shop import request as asks

FAILURE = {"error": "too large"}


def passes(case: Case, where: Undelivered | None, *, seconds: float = 10) -> Plan:
    return case.advance(seconds=seconds, where=where)


def test_a_command_that_is_still_in_the_outbox_counts_no_attempt_and_is_not_staged_again() -> None:
    case = Case(request("a", attempts=1))
    for _ in range(5):
        plan = passes(case, Undelivered.WAITING)
        assert (described(plan), case.entry("a").attempts, plan.wake_seconds) == ([], 1, 10)
    assert (case.status, case.progress("a"), case.attention) == (Status.RUNNING, StepStatus.STARTED, False)


def test_an_outage_is_one_entry_of_the_audit_log_however_long_it_lasts() -> None:
    case = Case(request("a"))
    lines = [len(passes(case, Undelivered.WAITING).notes) for _ in range(3)]
    assert lines == [1, 0, 0]


def test_a_command_that_has_left_after_an_outage_has_as_much_time_as_at_first() -> None:
    case = Case(request("a", attempts=1))
    passes(case, Undelivered.WAITING)
    plan = passes(case, None)
    assert (case.status, plan.wake_seconds, case.entry("a").error) == (Status.RUNNING, 10, None)
    passes(case, None)
    assert case.status is Status.FAILED


def test_what_an_earlier_attempt_may_have_done_is_not_forgotten_over_an_outage() -> None:
    case = Case(request("a"))
    passes(case, None)
    passes(case, None, seconds=5)
    passes(case, Undelivered.WAITING)
    assert (case.entry("a").error or "").startswith("unknown whether it happened before; its command is still")
    passes(case, None)
    assert case.entry("a").error == "unknown whether it happened before"


def test_only_commands_whose_time_is_over_are_looked_up() -> None:
    case = Case([request("a"), wait("b")])
    assert overdue(case.stored.load()) == []
    case.stored.now += timedelta(seconds=10)
    assert overdue(case.stored.load()) == [case.entry("a").command_event_id]


def test_every_attempt_is_a_command_of_its_own() -> None:
    case = Case(request("a"))
    first = case.entry("a").command_event_id
    passes(case, None)
    passes(case, None, seconds=5)
    assert None not in (first, case.entry("a").command_event_id)
    assert first != case.entry("a").command_event_id


def test_a_step_that_a_person_has_settled_was_answered_by_no_event() -> None:
    case = Case(request("a"), request("b"))
    case.order("mark_done")
    assert (case.progress("a"), case.entry("a").reply_event_id) == (StepStatus.DONE, None)


def test_a_dead_lettered_command_counts_no_attempt_and_needs_a_person_once() -> None:
    case = Case(request("a", attempts=1))
    plan = passes(case, Undelivered.DEAD_LETTER)
    remedy = f"outrider dead-letters replay {case.entry('a').command_event_id}"
    assert [remedy in reason for reason in plan.attention] == [True]
    assert (case.status, case.attention, case.entry("a").attempts) == (Status.RUNNING, True, 1)
    assert remedy in "\n".join(explain(case.stored.load(), case.definition).reasons)
    assert passes(case, Undelivered.DEAD_LETTER).attention == ()
    passes(case, Undelivered.WAITING)
    assert not case.attention
    passes(case, None)
    assert (case.attention, case.progress("a")) == (False, StepStatus.STARTED)


def test_explain_says_since_when_a_command_is_in_the_outbox() -> None:
    case = Case(request("a"))
    passes(case, Undelivered.WAITING)
    [reason, *_] = explain(case.stored.load(), case.definition).reasons
    assert "still in the outbox (pending since 2030-01-01 00:00:00 UTC; is a relay running?)" in reason


async def test_without_a_relay_a_saga_waits_and_goes_on_when_there_is_one() -> None:
    saga = order_saga()
    asks(saga, retry=ONCE)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    for _ in range(3):
        await shop.passes(30)
    assert await shop.progress(saga_id, "reserve") == (StepStatus.STARTED, 1)
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_a_compensation_that_has_not_left_costs_nothing_either() -> None:
    saga = order_saga()
    asks(saga, retry=TWICE)
    saga.wait("parcel.collected", timeout_seconds=5)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    await shop.passes(5)
    for _ in range(20):
        await shop.passes(30)
    assert await shop.progress(saga_id, "reserve", Phase.COMPENSATION) == (StepStatus.STARTED, 1)
    assert [compensate.event_type for compensate in await shop.sent()] == ["stock.release"]


async def test_a_dead_lettered_command_is_replayed_under_the_id_that_the_saga_names() -> None:
    saga = order_saga()
    asks(saga, retry=ONCE)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [row] = shop.outbox.tables.rows.values()
    assert await shop.outbox.admin.dead_letter(row.event.event_id, "ann", FAILURE, "block")
    await shop.passes(30)
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, instance.needs_attention) == (Status.RUNNING, True)
    replayed = UUID((instance.last_error or "").rsplit(" ", 1)[-1])
    assert await shop.outbox.admin.replay([replayed], "ann") == 1
    await shop.passes(30)
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, instance.needs_attention) == (Status.COMPLETED, False)
