"""The rules of drivers that report a commit."""

from __future__ import annotations

import logging
from contextlib import suppress

import pytest

from outrider import Outbox
from outrider.drivers.commit_hooks import after_commit
from tests.contract.drivers.connection_case import Case, RollBack, placed
from tests.contract.drivers.connection_kinds import POSTGRES, SQLITE, Chosen, chosen_of, params

HOOKED = [{name: kind for name, kind in kinds.items() if kind.hooked} for kinds in (POSTGRES, SQLITE)]


@pytest.fixture(params=params(*HOOKED, pooled=False))
def chosen(request: pytest.FixtureRequest) -> Chosen:
    return chosen_of(request)


async def test_a_call_that_fails_does_not_make_the_commit_look_failed(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("the call is broken")

    with caplog.at_level(logging.ERROR):
        async with case.transaction() as conn:
            await case.run(after_commit, conn, broken)
            await case.write(conn, "A")
    assert await case.database.notes() == ["A"]
    assert "the call is broken" in caplog.text


async def test_a_rollback_wakes_no_relay(case: Case) -> None:
    woken: list[str] = []
    with suppress(RollBack):
        async with case.transaction() as conn:
            await case.stage(conn, placed(), outbox=Outbox(wake=lambda: woken.append("wrong")))
            raise RollBack
    assert woken == []


async def test_a_released_savepoint_whose_transaction_rolls_back_calls_no_hook(case: Case) -> None:
    calls: list[str] = []
    with suppress(RollBack):
        async with case.transaction() as conn:
            await case.write(conn, "A")
            async with case.savepoint(conn):
                await case.run(after_commit, conn, lambda: calls.append("wrong"))
            raise RollBack
    assert calls == []
