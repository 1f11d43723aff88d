"""Fixtures shared by all tests: servers are started once per run, when a test first needs them.

A test whose server cannot be had is skipped, and the last lines of the run say which server and why. With
OUTRIDER_REQUIRE_SERVICES=1 it fails instead. A server that is there and does not start is always a failure.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import warnings
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never
from uuid import uuid4

import asyncpg
import pytest
from bson import Int64
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from pymongo import AsyncMongoClient, MongoClient

from outrider.stores.mongo import MongoSchema
from outrider.stores.postgres import PostgresStore
from outrider.stores.sqlite import SqliteSchema
from outrider.testing import servers
from tests.support import postgres_databases
from tests.support.postgres_databases import (
    DatabasePool,
    create_database,
    drop_database,
    end_pooled_sessions,
    name_of,
)
from tests.support.shared_servers import RemoteServers, ServedSet, Servers, ServerSet

pytest.register_assert_rewrite(
    "outrider.testing.contracts",
    *(f"tests.support.{name}_comparison" for name in ("inbox", "outbox", "saga")),
    *(f"tests.support.{name}" for name in ("inbox_locks", "kafka_client", "postgres_plans", "rabbitmq_client")),
)

# How long an example takes depends on what else the machine does.
hypothesis_settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("any machine")

REQUIRE_VARIABLE = "OUTRIDER_REQUIRE_SERVICES"
LOGS_VARIABLE = "OUTRIDER_TEST_LOGS"
MEMORY = Path("/dev/shm")
"""Where tests keep their files if there is room: SQLite waits for the disk at each commit, and a crash that a test
causes ends a process, not the machine."""
MEMORY_BYTES_MIN = 2_000_000_000
MISSING = "missing server"
SERVERS = pytest.StashKey[ServerSet | RemoteServers]()
FIXTURES = {
    "admin_url": "postgres",
    "pgbouncer_url": "pgbouncer",
    "kafka": "kafka",
    "rabbitmq_url": "rabbitmq",
    "mongo_url": "mongo",
}
"""Fixtures that need a server, and the mark of each."""
LONG = {*FIXTURES.values(), "chaos", "slow"}
"""Marks of the tests that a quick run leaves out."""
SLOW = {"test_40_000_followers_of_a_failing_head_do_not_slow_the_others_and_drain_in_order"}
"""Rules of the contracts that take long on every store; a contract that is shipped cannot carry our marks."""
FOLDERS = ("chaos", "end_to_end", "acceptance", "simulation", "integration", "contract")
"""From the folder with the longest tests to the one with the shortest."""
HALF_OPEN = r"unclosed <socket\.socket fd=\d+, family=\d+, type=\d+, proto=\d+, laddr=\([^()]*\)>"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-quick`."""
    parser.addoption("--quick", action="store_true", help="only tests that need no server and take no time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the servers that their fixtures need; put the long ones first, or leave them out."""
    for item in items:
        for name in FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(FIXTURES[name])
        if getattr(item, "originalname", None) in SLOW:
            item.add_marker("slow")
    # Workers steal from each other until the end, and then only short tests are left to wait for.
    items.sort(key=_position)
    if config.getoption("--quick"):
        long = {item for item in items if LONG & {mark.name for mark in item.iter_markers()}}
        config.hook.pytest_deselected(items=list(long))
        items[:] = [item for item in items if item not in long]


def _position(item: pytest.Item) -> int:
    return next((number for number, folder in enumerate(FOLDERS) if folder in item.path.parts), len(FOLDERS))


@pytest.fixture(autouse=True)
def _no_server_in_a_quick_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts a server though none of its marks says so."""

    def reject_start(server: servers.Server) -> Never:
        pytest.fail(f"{request.node.nodeid} starts {server.name}; mark it, so that quick runs leave it out.")

    if request.config.getoption("--quick"):
        monkeypatch.setattr(servers.Server, "start", reject_start)


def pytest_configure(config: pytest.Config) -> None:
    """Name the folder of kept logs here, so that all workers inherit it, and find the servers of the run."""
    os.environ.setdefault(LOGS_VARIABLE, str(servers.kept_logs()))
    os.environ.setdefault("OUTRIDER_ACTOR", "cli:tester")
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES_MIN:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if hasattr(config, "workerinput"):
        config.stash[SERVERS] = RemoteServers(config.workerinput["servers"])
    else:
        config.stash[SERVERS] = ServedSet() if config.getoption("numprocesses", None) else ServerSet()
    # A client of pymongo that is closed while its monitor connects leaves a socket that never had a peer.
    config.addinivalue_line("filterwarnings", rf"ignore:{HALF_OPEN}:ResourceWarning")
    warnings.filterwarnings("ignore", HALF_OPEN, ResourceWarning)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where to ask for servers."""
    node.workerinput["servers"] = node.config.stash[SERVERS].address


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the servers after the last worker, and before the summary, which names the logs that were kept."""
    if isinstance(owned := session.config.stash[SERVERS], ServerSet):
        owned.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Fixtures start most servers."""
    with skip_or_fail_if_missing(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Some tests start one themselves."""
    with skip_or_fail_if_missing(item):
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
def skip_or_fail_if_missing(item: pytest.Item) -> Iterator[None]:
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
    """Keep the logs of this process's servers when a test fails."""
    report = yield
    if report.failed:
        servers.keep_logs()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the logs of shared servers when a test fails in a worker."""
    if report.failed:
        servers.keep_logs()


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
def shared_servers(pytestconfig: pytest.Config) -> Servers:
    """The servers that all workers of the run share."""
    return pytestconfig.stash[SERVERS]


@pytest.fixture(scope="session")
def admin_url(shared_servers: Servers) -> str:
    """A private PostgreSQL, gone when the tests end; or the one that OUTRIDER_TEST_POSTGRES names."""
    return shared_servers.url("postgres")


@pytest.fixture(scope="session")
def pgbouncer_url(shared_servers: Servers) -> str:
    """A private PgBouncer in front of that PostgreSQL; or the one that OUTRIDER_TEST_PGBOUNCER names."""
    return shared_servers.url("pgbouncer")


@pytest.fixture(scope="session")
def kafka(shared_servers: Servers) -> str:
    """The address of a private Kafka; or the one that OUTRIDER_TEST_KAFKA names."""
    return shared_servers.url("kafka")


@pytest.fixture(scope="session")
def rabbitmq_url(shared_servers: Servers) -> str:
    """A private RabbitMQ; or the one that OUTRIDER_TEST_RABBITMQ names."""
    return shared_servers.url("rabbitmq")


@pytest.fixture(scope="session")
def mongo_url() -> Iterator[str]:
    """A private MongoDB, a replica set of one; or the one that OUTRIDER_TEST_MONGO names.

    Each worker has its own: staging writes into the database `outrider` by default, and tests check that.
    """
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
    """A MongoDB with everything installed under the default name of staging, and empty."""
    await MongoSchema(mongo_url).migrate()
    yield mongo_url
    await _empty(mongo_url, "outrider")


async def _empty(mongo_url: str, name: str) -> None:
    """Leave nothing but what was installed: to make collections anew would take longer than most tests."""
    async with AsyncMongoClient[dict[str, Any]](mongo_url) as client:
        database = client[name]
        kept = {"outrider_migration", "outbox_meta", "outbox_lane", "outbox_operation_head"}
        for found in set(await database.list_collection_names()) - kept:
            await database[found].delete_many({})
        head = {"lines": Int64(0), "hash": b"", "unchained": Int64(0)}
        await database["outbox_operation_head"].update_one({"_id": 1}, {"$set": head}, upsert=True)
        await database["outbox_meta"].delete_many({"_id": "journal"})
        await database["outbox_lane"].update_many({}, {"$set": {"owner": None, "epoch": 0, "turn": 0}})


@pytest.fixture(scope="session")
def installed_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with everything installed, to be copied: an installation takes longer than most tests."""
    path = tmp_path_factory.mktemp("installed") / "installed.db"
    asyncio.run(SqliteSchema(path).migrate())
    return path


@pytest.fixture
def sqlite_path(installed_sqlite: Path, tmp_path: Path) -> Path:
    """A fresh SQLite file with everything installed."""
    return Path(shutil.copy(installed_sqlite, tmp_path / "shop.db"))


@pytest.fixture(scope="session")
def installed_template(admin_url: str) -> Iterator[str]:
    """The name of a PostgreSQL database with everything installed, to be copied."""
    name = asyncio.run(postgres_databases.install_template(admin_url))
    yield name
    asyncio.run(drop_database(admin_url, name))


@pytest.fixture(scope="session")
def database_pool(admin_url: str, installed_template: str) -> Iterator[DatabasePool]:
    """PostgreSQL databases that go from test to test."""
    pool = DatabasePool(admin_url, installed_template)
    yield pool
    asyncio.run(pool.close())


@pytest.fixture
async def empty_database(admin_url: str) -> AsyncIterator[str]:
    """A fresh database with nothing in it."""
    url = await create_database(admin_url, f"test_{uuid4().hex[:12]}")
    yield url
    await drop_database(admin_url, name_of(url))


@pytest.fixture
async def postgres_url(request: pytest.FixtureRequest, database_pool: DatabasePool) -> AsyncIterator[str]:
    """A database that is as the installation left it."""
    url = await database_pool.take()
    yield url
    if "pgbouncer_url" in request.fixturenames:
        # The pooler keeps sessions to the database, which must not meet what the next test does there.
        await end_pooled_sessions(request.getfixturevalue("pgbouncer_url"), name_of(url))
    await database_pool.give_back(url)


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
