"""Sending straight after the commit, from applications that have an event loop elsewhere or none at all."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from outrider import Outbox, UsageError
from outrider.app import open_store
from outrider.background import Background
from outrider.drivers.commit_hooks import after_commit
from outrider.outbox.optimistic import OptimisticWriter
from outrider.testing import MemoryBroker
from tests.contract.drivers.connection_case import placed
from tests.contract.drivers.databases import SqliteDatabase


def test_an_application_without_an_event_loop_sends_at_once(sqlite_database: SqliteDatabase) -> None:
    background, broker, outbox = Background("writer"), MemoryBroker(), Outbox()
    store = background.run(open_store(sqlite_database.url)).result()
    writer = OptimisticWriter(
        store, broker, outbox.insert, insert_sync=outbox.insert_sync, after_commit=after_commit, loop=background.loop
    )
    with Session(sa.create_engine(sqlite_database.url)) as session, session.begin():
        writer.enlist(session).stage_sync(session, placed())
    background.run(writer.close()).result()
    assert [message.headers["event_type"] for message in broker.log] == ["order.placed"]
    background.run(store.close()).result()
    background.close()


async def test_closing_a_writer_waits_for_a_commit_of_this_very_moment(sqlite_database: SqliteDatabase) -> None:
    store, broker, outbox = await open_store(sqlite_database.url), MemoryBroker(), Outbox()
    writer = OptimisticWriter(store, broker, outbox.insert, insert_sync=outbox.insert_sync, after_commit=after_commit)
    with Session(sa.create_engine(sqlite_database.url)) as session, session.begin():
        writer.enlist(session).stage_sync(session, placed())
    await writer.close()
    assert len(broker.log) == 1
    await store.close()


async def test_a_writer_without_a_hook_names_the_missing_argument(sqlite_database: SqliteDatabase) -> None:
    store = await open_store(sqlite_database.url)
    writer = OptimisticWriter(store, MemoryBroker(), Outbox().insert)
    with Session(sa.create_engine(sqlite_database.url)) as session, session.begin():
        with pytest.raises(UsageError, match=r"create it with after_commit="):
            writer.enlist(session)
        with pytest.raises(UsageError, match=r"create it with insert_sync=outbox.insert_sync"):
            writer.batch().stage_sync(session, placed())
    await store.close()
