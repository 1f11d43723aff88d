"""One suite for every kind of connection: staged events are committed or rolled back with the transaction."""

from __future__ import annotations

import json
from contextlib import suppress
from uuid import uuid4

import pytest

from outrider import Event, InvalidEvent, NotInTransaction
from outrider.event import uuid7
from outrider.saga.model import MessageKind, NewSaga, NewSagaMessage, Phase
from tests.contract.drivers.connection_case import Case, RollBack, placed
from tests.contract.drivers.connection_kinds import POSTGRES, SQLITE, Chosen, chosen_of, params


@pytest.fixture(params=params(POSTGRES, SQLITE))
def chosen(request: pytest.FixtureRequest) -> Chosen:
    return chosen_of(request)


async def test_a_committed_event_is_there_with_the_row_it_belongs_to(case: Case) -> None:
    async with case.transaction() as conn:
        await case.write(conn, "A")
        [event_id] = await case.stage(conn, placed())
        assert await case.database.types() == []
    assert await case.database.notes() == ["A"]
    assert await case.database.staged() == [("order.placed", None, "pending")]
    [row] = await case.database.fetch(
        f"SELECT event_id, payload, headers, aggregate_id FROM {case.database.prefix}outbox"
    )
    assert (str(row[0]), json.loads(row[1]), json.loads(row[2]), row[3]) == (
        str(event_id),
        {"text": "naïve ☂", "price": 12},
        {},
        "A",
    )


async def test_a_rolled_back_event_never_existed(case: Case) -> None:
    with suppress(RollBack):
        async with case.transaction() as conn:
            await case.write(conn, "A")
            await case.stage(conn, placed())
            raise RollBack
    assert (await case.database.notes(), await case.database.types()) == ([], [])


async def test_it_is_committed_or_rolled_back_with_a_transaction_in_which_nothing_was_written_before(
    case: Case,
) -> None:
    with suppress(RollBack):
        async with case.transaction() as conn:
            await case.stage(conn, placed("gone"))
            await case.write(conn, "A")
            raise RollBack
    assert (await case.database.notes(), await case.database.types()) == ([], [])
    async with case.transaction() as conn:
        await case.stage(conn, placed("kept"))
    assert await case.database.types() == ["kept"]


async def test_a_savepoint_rolled_back_takes_its_own_events_only(case: Case) -> None:
    async with case.transaction() as conn:
        await case.stage(conn, placed("one", sequence="auto"))
        with suppress(RollBack):
            async with case.savepoint(conn):
                await case.write(conn, "B")
                await case.stage(conn, placed("two", sequence="auto"))
                raise RollBack
        await case.stage(conn, placed("three", sequence="auto"))
    assert await case.database.staged() == [("one", 1, "pending"), ("three", 2, "pending")]
    assert await case.database.notes() == []


async def test_a_savepoint_released_is_not_a_commit(case: Case) -> None:
    with suppress(RollBack):
        async with case.transaction() as conn:
            await case.stage(conn, placed("one"))
            async with case.savepoint(conn):
                await case.stage(conn, placed("two"))
            raise RollBack
    assert await case.database.types() == []
    async with case.transaction() as conn:
        await case.stage(conn, placed("one"))
        async with case.savepoint(conn):
            await case.stage(conn, placed("two"))
    assert await case.database.types() == ["one", "two"]


async def test_many_events_are_staged_in_order(case: Case) -> None:
    events = [placed(f"n{number:03}", key="K", priority=7) for number in range(150)]
    async with case.transaction() as conn:
        ids = await case.stage(conn, *events)
        assert await case.stage(conn) == []
    assert len(set(ids)) == 150
    assert await case.database.types() == [event.event_type for event in events]


async def test_streams_are_numbered_without_gaps(case: Case) -> None:
    known = uuid4()
    async with case.transaction() as conn:
        await case.stage(conn, placed("a1", sequence="auto"))
        await case.stage(conn, placed("a2", sequence="auto", event_id=known), placed("b1", key="B", sequence="auto"))
        await case.stage(conn, placed("again", sequence="auto", event_id=known), placed("a3", sequence="auto"))
    staged = {name: sequence for name, sequence, _ in await case.database.staged()}
    assert staged == {"a1": 1, "a2": 2, "b1": 1, "a3": 3}


async def test_an_id_that_is_known_is_staged_once(case: Case) -> None:
    known = uuid4()
    for _ in range(2):
        async with case.transaction() as conn:
            assert await case.stage(conn, placed(event_id=known), placed("other", event_id=known)) == [known, known]
            assert await case.stage(conn, placed(event_id=known)) == [known]
    assert await case.database.types() == ["order.placed"]


async def test_an_optimistic_claim_is_kept_with_the_event(case: Case) -> None:
    async with case.transaction() as conn:
        first = await case.claim(conn, placed("first"))
        behind = await case.claim(conn, placed("behind"))
    assert [row.optimistic for row in (*first, *behind)] == [True, False]
    assert [(name, state) for name, _, state in await case.database.staged()] == [
        ("first", "optimistic"),
        ("behind", "pending"),
    ]


async def test_bad_input_is_rejected_and_leaves_the_transaction_as_it_was(case: Case) -> None:
    async with case.transaction() as conn:
        await case.write(conn, "A")
        with pytest.raises(InvalidEvent, match=r"payload\.price"):
            await case.stage(conn, Event("x", {"price": float("nan")}))
    assert (await case.database.notes(), await case.database.types()) == (["A"], [])


async def test_a_connection_that_commits_every_statement_is_rejected_with_the_remedy(case: Case) -> None:
    async with case.idle() as conn:
        with pytest.raises(NotInTransaction, match=r"begin|BEGIN|transaction\(\)|atomic|AUTOCOMMIT"):
            await case.stage(conn, placed())
    assert await case.database.types() == []


async def test_a_saga_is_started_once_and_gets_its_messages(case: Case) -> None:
    saga = NewSaga(uuid7(), "order", 1, "A-7", b'{"order": "A-7"}', None)
    reply = NewSagaMessage(saga.saga_id, MessageKind.REPLY, "stock.reserved", "key", b'{"n": 3}', uuid7())
    with suppress(RollBack):
        async with case.transaction() as conn:
            assert await case.start(conn, saga) is True
            raise RollBack
    assert await case.database.sagas() == []
    async with case.transaction() as conn:
        assert await case.start(conn, saga) is True
        assert await case.start(conn, saga) is False
        assert await case.deliver(conn, [reply, reply._replace(event_id=uuid7())]) == 2
        assert await case.deliver(conn, [reply]) == 0
        assert await case.deliver(conn, []) == 0
    assert (await case.database.sagas(), await case.database.messages()) == (["A-7"], 2)


async def test_a_participant_enters_a_command_once_and_gives_the_same_answer_again(case: Case) -> None:
    async with case.transaction() as conn:
        assert (await case.enter(conn, "k1", Phase.ACTION)).fresh
        await case.keep(conn, "k1", Phase.ACTION, '{"reply": "naïve"}'.encode())
        assert (await case.enter(conn, "k2", Phase.COMPENSATION)).barred
    async with case.transaction() as conn:
        again = await case.enter(conn, "k1", Phase.ACTION)
        assert (again.fresh, again.barred, json.loads(again.reply or b"")) == (False, False, {"reply": "naïve"})
        barred = await case.enter(conn, "k2", Phase.ACTION)
        assert (barred.fresh, barred.barred, barred.reply) == (False, True, None)
