"""Rules of SQLAlchemy alone: it writes and begins late, and may know several databases."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import outrider
from outrider import NotInTransaction, Transient, UsageError
from outrider.drivers.commit_hooks import after_commit
from tests.contract.drivers.connection_case import RollBack, placed
from tests.contract.drivers.databases import SqliteDatabase
from tests.contract.drivers.sqlalchemy_cases import AlchemySqliteByHand, AlchemySqliteSession, Note


@pytest.fixture
def engine(sqlite_database: SqliteDatabase) -> sa.Engine:
    return sa.create_engine(sqlite_database.url)


def test_a_session_is_flushed_before_the_event_gets_its_position(engine: sa.Engine) -> None:
    with Session(engine, autoflush=False) as session, session.begin():
        session.add(Note(what="A"))
        outrider.stage_sync(session, placed())
        assert not session.new


def test_a_session_begun_by_its_first_change_will_do(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(Note(what="A"))
        outrider.stage_sync(session, placed())
        session.commit()
        with pytest.raises(NotInTransaction, match=r"with session.begin\(\):"):
            outrider.stage_sync(session, placed())


def test_a_session_on_several_databases_is_rejected_and_a_connection_of_the_right_one_is_not(
    engine: sa.Engine, sqlite_database: SqliteDatabase
) -> None:
    elsewhere = sa.create_engine("sqlite://")
    for session in (Session(elsewhere, binds={Note: engine}), Session(binds={Note: engine})):
        with session, session.begin():
            with pytest.raises(UsageError, match="several databases"):
                outrider.stage_sync(session, placed())
            outrider.stage_sync(session.connection(bind_arguments={"mapper": Note}), placed())
    with Session(engine, binds={Note: engine}) as session, session.begin():
        outrider.stage_sync(session, placed())


async def test_a_session_that_chooses_by_itself_what_goes_where_is_rejected_when_it_has_chosen_two(
    engine: sa.Engine, sqlite_template: Path, tmp_path: Path, sqlite_database: SqliteDatabase
) -> None:
    elsewhere = sa.create_engine(f"sqlite:///{shutil.copy(sqlite_template, tmp_path / 'elsewhere.db')}")

    class Routing(Session):
        def get_bind(self, mapper: Any = None, **_: Any) -> sa.Engine:
            return engine if mapper else elsewhere

    with Routing() as session, session.begin():
        session.add(Note(what="A"))
        with pytest.raises(UsageError, match="several databases"):
            outrider.stage_sync(session, placed())
        outrider.stage_sync(session.connection(bind_arguments={"mapper": Note}), placed())
    assert (await sqlite_database.notes(), await sqlite_database.types()) == (["A"], ["order.placed"])


@pytest.mark.parametrize("hook", ["before_flush", "after_flush"])
async def test_a_session_that_is_being_flushed_is_rejected_and_its_connection_is_not(
    engine: sa.Engine, hook: str, sqlite_database: SqliteDatabase
) -> None:
    def stage(session: Session, *_: Any) -> None:
        with pytest.raises(UsageError, match=r"`before_commit` instead, or pass session.connection\(\)"):
            outrider.stage_sync(session, placed())
        outrider.stage_sync(session.connection(), placed())

    with Session(engine) as session, session.begin():
        sa.event.listen(session, hook, stage)
        session.add(Note(what="A"))
    assert (await sqlite_database.notes(), await sqlite_database.types()) == (["A"], ["order.placed"])


def test_a_database_that_somebody_else_writes_to_may_be_tried_again(sqlite_database: SqliteDatabase) -> None:
    impatient = sa.create_engine(sqlite_database.url, connect_args={"timeout": 0.01})
    other = sqlite3.connect(sqlite_database.path)
    other.execute("BEGIN IMMEDIATE")
    rejected = pytest.raises(Transient, match="another process is writing")
    with Session(impatient) as session, session.begin(), rejected:
        outrider.stage_sync(session, placed())
    other.close()


async def test_with_pythons_own_transactions_a_first_savepoint_commits_its_row_and_its_event_together(
    sqlite_database: SqliteDatabase,
) -> None:
    case = AlchemySqliteSession(sqlite_database)
    with suppress(RollBack):
        async with case.transaction() as session:
            async with case.savepoint(session):
                await case.write(session, "A")
                await case.stage(session, placed())
            raise RollBack
    # The row was not rolled back either; the next test shows the way to begin properly.
    assert (await sqlite_database.notes(), await sqlite_database.types()) == (["A"], ["order.placed"])
    await case.close()


async def test_begun_by_hand_a_first_savepoint_is_committed_or_rolled_back_with_its_transaction(
    sqlite_database: SqliteDatabase,
) -> None:
    case = AlchemySqliteByHand(sqlite_database)
    with suppress(RollBack):
        async with case.transaction() as session:
            async with case.savepoint(session):
                await case.write(session, "A")
                await case.stage(session, placed())
            raise RollBack
    assert (await sqlite_database.notes(), await sqlite_database.types()) == ([], [])
    await case.close()


def test_a_session_that_is_used_again_calls_no_hook_of_a_rollback(engine: sa.Engine) -> None:
    calls: list[str] = []

    def call() -> None:
        calls.append("called")

    with Session(engine) as session:
        session.begin()
        after_commit(session, call)
        session.rollback()
        session.begin()
        after_commit(session, call)
        session.add(Note(what="A"))
        session.close()
        with session.begin():
            session.add(Note(what="B"))
        assert calls == []
        with session.begin():
            after_commit(session, call)
            after_commit(session, call)
            with suppress(RollBack), session.begin_nested():
                raise RollBack
        with session.begin():
            session.add(Note(what="C"))
    assert calls == ["called"]
