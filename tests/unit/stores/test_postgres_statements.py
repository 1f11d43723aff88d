"""The statements that go to PostgreSQL, whichever driver takes them there."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from outrider import Event, Transient, UsageError
from outrider.drivers.base import translating, translating_async
from outrider.outbox.model import OptimisticClaim, StagedRow
from outrider.outbox.validation import StagingRules, validate_events
from outrider.stores.postgres import statements
from outrider.stores.postgres.statements import OPERATIONS, Statements, stage
from outrider.stores.statements import run_statements, run_statements_async

SQL = {sql: name for name, sql in statements.load("outrider").items()}
KNOWN = uuid4()


def staging(*events: Event, claim: OptimisticClaim | None = None) -> Statements[list[StagedRow]]:
    return stage("outrider", validate_events(events, StagingRules()), claim)


def event(**fields: Any) -> Event:
    return Event("order.placed", {}, **{"key": "A", **fields})


class Server:
    """Answers as if everything were inserted, and notes what it was asked."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.asked: list[str] = []
        self._failure = failure

    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        self.asked.append(SQL[sql])
        if SQL[sql] in ("lock_counters", "retract"):
            return []
        if self._failure is not None:
            raise self._failure
        ids = args[0] if isinstance(args[0], list) else [args[0]]
        return [(event_id, "pending") for event_id in ids]

    async def aexecute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        return self.execute(sql, *args)


class Failure(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("events", "claim", "asked"),
    [
        ([], None, []),
        ([event()], None, ["stage_one"]),
        ([event(), event()], None, ["stage"]),
        ([event()], OptimisticClaim("writer", 2), ["stage"]),
        ([event(event_id=KNOWN)], None, ["stage_one", "retract"]),
        ([event(sequence="auto")], None, ["stage_numbered_one"]),
        ([event(sequence="auto", event_id=KNOWN)], None, ["lock_counters", "stage_numbered"]),
        ([event(), event(key="B", sequence="auto")], None, ["stage_one", "stage_numbered_one"]),
    ],
)
def test_as_few_statements_are_run_as_will_do(
    events: list[Event], claim: OptimisticClaim | None, asked: list[str]
) -> None:
    server = Server()
    inserted = run_statements(staging(*events, claim=claim), translating(server.execute, "outrider"))
    assert (server.asked, len(inserted)) == (asked, len(events))


@pytest.mark.parametrize(
    ("code", "numbered", "expected"),
    [
        ("42P01", False, UsageError),
        ("3F000", False, UsageError),
        ("23505", True, Transient),
        ("23505", False, Failure),
        ("40001", True, Failure),
        (None, False, Failure),
    ],
)
async def test_errors_are_translated_by_their_code_awaited_or_not(
    code: str | None, numbered: bool, expected: type[Exception]
) -> None:
    failure = Failure(code)

    def statements() -> Statements[list[StagedRow]]:
        return staging(event(sequence="auto"), event(sequence="auto")) if numbered else staging(event())

    with pytest.raises(expected) as raised:
        run_statements(statements(), translating(Server(failure).execute, "outrider"))
    with pytest.raises(expected) as raised_awaited:
        await run_statements_async(statements(), translating_async(Server(failure).aexecute, "outrider"))
    assert expected is Failure or (raised.value.__cause__ is failure and raised_awaited.value.__cause__ is failure)


def test_every_operation_has_a_script() -> None:
    assert set(OPERATIONS) == {"stage", "start_saga", "deliver_messages", "participant_enter", "participant_save_reply"}
