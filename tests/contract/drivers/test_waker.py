"""Waking relays from applications: by a notification of PostgreSQL, after the commit, on a connection of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

import pytest

from outrider import Outbox, Waker, config
from outrider.cli.relay import run_beside
from outrider.stores.postgres import PostgresStore
from outrider.stores.postgres.wakeup import NotificationListener
from outrider.telemetry.events import Handled, Observers
from outrider.waker import StagedObserver
from tests.contract.drivers.connection_case import Case, placed
from tests.contract.drivers.databases import PostgresDatabase
from tests.contract.drivers.django_case import Django
from tests.contract.drivers.driver_cases import AsyncpgConnection, Psycopg
from tests.contract.drivers.sqlalchemy_cases import AlchemySession

pytestmark = pytest.mark.postgres

WAIT_SECONDS = 10
AGAIN_SECONDS = 0.05


@pytest.fixture
async def heard(postgres_database: PostgresDatabase) -> AsyncIterator[asyncio.Event]:
    """The event that a listening relay sets when it is woken."""
    store, heard = await PostgresStore.open(postgres_database.url), asyncio.Event()
    # Only notifications: a relay also looks at the id sequence.
    listener = NotificationListener(store.database, "outrider_outbox")
    async with listener.listening(heard.set), asyncio.timeout(WAIT_SECONDS):
        # The listener connects in the background, and does not say when it has.
        while not heard.is_set():
            await store.notify()
            await asyncio.sleep(AGAIN_SECONDS)
        await asyncio.sleep(AGAIN_SECONDS)
        heard.clear()
        yield heard
    await store.close()


@pytest.mark.parametrize("kind", [AsyncpgConnection, Psycopg, AlchemySession, Django])
async def test_a_relay_hears_of_what_was_staged(
    postgres_database: PostgresDatabase, heard: asyncio.Event, kind: type[Case]
) -> None:
    case = kind(postgres_database)
    waker = Waker(postgres_database.url)
    async with case.transaction() as conn:
        await case.stage(conn, placed(), outbox=Outbox(wake=waker))
    async with asyncio.timeout(WAIT_SECONDS):
        await heard.wait()
    await asyncio.to_thread(waker.close)
    await case.close()


async def test_a_consumer_process_wakes_relays_after_its_handlers_have_staged(
    postgres_database: PostgresDatabase, heard: asyncio.Event
) -> None:
    chosen, staged = config.load({"store": postgres_database.url, "broker": "null://"}, {}), StagedObserver()
    async with run_beside(chosen, Observers(), staged, enabled=False), asyncio.timeout(WAIT_SECONDS):
        staged.emit(Handled("billing", 1, 0, 0, 0, 0, 0.0, staged=1))
        await heard.wait()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_waker_works_on_in_a_child_process(postgres_database: PostgresDatabase, heard: asyncio.Event) -> None:
    waker = Waker(postgres_database.url)
    waker()
    async with asyncio.timeout(WAIT_SECONDS):
        await heard.wait()
    heard.clear()
    child = os.fork()
    if child == 0:
        # Neither the thread nor the connection of the parent may be used here.
        waker()
        waker.close()
        os._exit(0)
    async with asyncio.timeout(WAIT_SECONDS):
        await heard.wait()
    assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)
    await asyncio.to_thread(waker.close)


def test_a_closed_waker_starts_nothing_again(postgres_database: PostgresDatabase) -> None:
    before = set(threading.enumerate())
    waker = Waker(postgres_database.url)
    waker()
    waker.close()
    # Without a hook, staging wakes relays a moment later, which may be after the end.
    waker()
    waker.close()
    assert set(threading.enumerate()) <= before
