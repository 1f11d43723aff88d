"""Fixtures shared by all tests: servers are started once per worker, databases are made per test.

A test whose server cannot be had is skipped, and the last lines of the run say which server and why. With
OUTRIDER_REQUIRE_SERVICES=1 it fails instead. A server that is there and does not start is always a failure.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
from pymongo import AsyncMongoClient, MongoClient

from outrider.stores.mongo import MongoSchema
from outrider.stores.postgres import PostgresSchema, PostgresStore
from outrider.testing import servers

pytest.register_assert_rewrite(
    "outrider.testing.contract",
    "outrider.testing.inbox_contract",
    "outrider.testing.saga_contract",
    "outrider.testing.source_contract",
)

REQUIRE_VARIABLE = "OUTRIDER_REQUIRE_SERVICES"
LOGS_VARIABLE = "OUTRIDER_TEST_LOGS"
MISSING = "missing server"
HALF_OPEN = r"unclosed <socket\.socket fd=\d+, family=\d+, type=\d+, proto=\d+, laddr=\([^()]*\)>"


def pytest_configure(config: pytest.Config) -> None:
    """Name the folder of kept logs here, so that all workers inherit it."""
    os.environ.setdefault(LOGS_VARIABLE, str(servers.kept_logs()))
    # A client of pymongo that is closed while its monitor connects leaves a socket that never had a peer.
    config.addinivalue_line("filterwarnings", rf"ignore:{HALF_OPEN}:ResourceWarning")
    warnings.filterwarnings("ignore", HALF_OPEN, ResourceWarning)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Fixtures start most servers."""
    with missing_servers_judged(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Some tests start one themselves."""
    with missing_servers_judged(item):
        return (yield)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process set up logging, and the next test must not hear less because of that."""
    root, ours = logging.getLogger(), logging.getLogger("outrider")
    handlers, level = list(root.handlers), ours.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
    ours.setLevel(level)


@contextmanager
def missing_servers_judged(item: pytest.Item) -> Iterator[None]:
    """Skip a test whose server is missing, or fail it where servers are required."""
    try:
        yield
    except servers.ServerMissing as error:
        reason = str(error).splitlines()[0]
        # Properties of a test travel with its report, from a worker to the process that sums up.
        item.user_properties.append((MISSING, reason))
        if os.environ.get(REQUIRE_VARIABLE, "0") not in ("", "0"):
            pytest.fail(f"{reason} {REQUIRE_VARIABLE} is set, so this is a failure.", pytrace=False)
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what the servers said when a test fails."""
    report = yield
    if report.failed:
        servers.keep_logs()
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """After everything else, say which servers were missing and why, and where the logs are."""
    yield
    reports = [report for found in terminalreporter.stats.values() for report in found]
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    if reasons := sorted({value for name, value in properties if name == MISSING}):
        terminalreporter.write_line(f"Tests lacked servers. {' '.join(reasons)}", yellow=True)
    if terminalreporter.stats.keys() & {"failed", "error"} and (logs := servers.kept_logs()).is_dir():
        terminalreporter.write_line(f"Logs of servers are kept in {logs}", yellow=True)


@pytest.fixture(scope="session")
def admin_url() -> Iterator[str]:
    """A private PostgreSQL, gone when the tests end; or the one that OUTRIDER_TEST_POSTGRES names."""
    with servers.postgres_url() as url:
        yield url


@pytest.fixture(scope="session")
def pgbouncer_url(admin_url: str) -> Iterator[str]:
    """A private PgBouncer in front of that PostgreSQL; or the one that OUTRIDER_TEST_PGBOUNCER names."""
    with servers.pgbouncer_url(admin_url) as url:
        yield url


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """The address of a private Kafka; or the one that OUTRIDER_TEST_KAFKA names."""
    with servers.kafka_bootstrap() as bootstrap:
        yield bootstrap


@pytest.fixture(scope="session")
def rabbitmq_url() -> Iterator[str]:
    """A private RabbitMQ; or the one that OUTRIDER_TEST_RABBITMQ names."""
    with servers.rabbitmq_url() as url:
        yield url


@pytest.fixture(scope="session")
def mongo_url() -> Iterator[str]:
    """A private MongoDB, a replica set of one; or the one that OUTRIDER_TEST_MONGO names."""
    with servers.mongo_url() as url:
        yield url


@pytest.fixture(scope="session")
def installed_mongo(mongo_url: str) -> Iterator[str]:
    """The name of a MongoDB database with everything installed."""
    name = f"test_{uuid4().hex[:12]}"
    asyncio.run(MongoSchema(mongo_url, schema=name).migrate())
    yield name
    with MongoClient[dict[str, Any]](mongo_url) as client:
        client.drop_database(name)


@pytest.fixture
async def mongo_schema(mongo_url: str, installed_mongo: str) -> AsyncIterator[str]:
    """The name of a MongoDB database with everything installed, and empty."""
    yield installed_mongo
    await _empty(mongo_url, installed_mongo)


@pytest.fixture
async def mongo_default(mongo_url: str) -> AsyncIterator[str]:
    """A MongoDB with everything installed under the name that staging uses unless told otherwise, and empty."""
    await MongoSchema(mongo_url).migrate()
    yield mongo_url
    await _empty(mongo_url, "outrider")


async def _empty(mongo_url: str, name: str) -> None:
    """Leave nothing but what was installed: to make collections anew would take longer than most tests."""
    async with AsyncMongoClient[dict[str, Any]](mongo_url) as client:
        database = client[name]
        for found in set(await database.list_collection_names()) - {"outrider_migration", "outbox_meta", "outbox_lane"}:
            await database[found].delete_many({})
        await database["outbox_lane"].update_many({}, {"$set": {"owner": None, "epoch": 0, "turn": 0}})


@pytest.fixture(scope="session")
def installed_template(admin_url: str) -> Iterator[str]:
    """A database with the outbox installed, to be copied."""
    name = f"installed_{uuid4().hex[:12]}"
    url = asyncio.run(_create(admin_url, name))
    asyncio.run(PostgresSchema(url).migrate())
    yield name
    asyncio.run(_drop(admin_url, name))


@pytest.fixture
async def empty_database(admin_url: str) -> AsyncIterator[str]:
    """A fresh database with nothing in it."""
    name = f"test_{uuid4().hex[:12]}"
    yield await _create(admin_url, name)
    await _drop(admin_url, name)


@pytest.fixture
async def postgres_url(admin_url: str, installed_template: str) -> AsyncIterator[str]:
    """A fresh database with the outbox installed."""
    name = f"test_{uuid4().hex[:12]}"
    yield await _create(admin_url, name, f"TEMPLATE {installed_template}")
    await _drop(admin_url, name)


async def _create(admin_url: str, name: str, options: str = "") -> str:
    admin = await asyncpg.connect(admin_url)
    await admin.execute(f"CREATE DATABASE {name} {options}")
    await admin.close()
    return urlsplit(admin_url)._replace(path=f"/{name}").geturl()


async def _drop(admin_url: str, name: str) -> None:
    admin = await asyncpg.connect(admin_url)
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


@pytest.fixture
async def conn(postgres_url: str) -> AsyncIterator[Any]:
    """A connection as an application has one."""
    conn = await asyncpg.connect(postgres_url)
    yield conn
    await conn.close()


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    """An open store on PostgreSQL."""
    store = await PostgresStore.open(postgres_url)
    yield store
    await store.close()
