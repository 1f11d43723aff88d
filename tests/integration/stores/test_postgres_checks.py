"""The checks of the doctor on PostgreSQL, with good and bad settings, and with store or broker missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

import outrider
from outrider import Event, config
from outrider.checks import CheckResult, Level
from outrider.cli.doctor import check, exit_code
from outrider.stores.postgres import PostgresSchema, PostgresStore
from outrider.stores.postgres import checks as looking
from outrider.testing.servers import PgBouncer, PostgresServer

pytestmark = pytest.mark.postgres
OK, WARN, ERROR = Level.OK, Level.WARN, Level.ERROR


class Replica(PostgresServer):
    """A server that follows another."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self._primary = primary

    def create(self) -> None:
        """Copy the primary."""
        place = ["--host=127.0.0.1", f"--port={self._primary.port}", "--username=postgres"]
        copy = [str(self.programs / "pg_basebackup"), *place, "--pgdata", str(self.home / "data"), "-R", "-c", "fast"]
        self.run(copy, "pg_basebackup")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server as it should be."""
    with PostgresServer(fsync=True) as running:
        yield running


@pytest.fixture
async def place(server: PostgresServer) -> str:
    """A database with the outbox installed."""
    url = server.database(f"test_{uuid4().hex[:12]}")
    await PostgresSchema(url).migrate()
    return url


async def diagnosed(**options: Any) -> list[CheckResult]:
    return await check(config.load({"broker": "null://", **options}, {}))


async def of_store(url: str, **options: Any) -> dict[str, CheckResult]:
    """Return what a store says of itself, by the name of the check."""
    store = await PostgresStore.open(url, **options)
    try:
        found = await store.check()
    finally:
        await store.close()
    assert {result.check for result in found} == looking.CHECKS.keys()
    assert all(bool(result.remedy) == (result.level is not OK) for result in found)
    return {result.check: result for result in found}


async def run(url: str, *statements: str) -> None:
    conn = await asyncpg.connect(url)
    for statement in statements:
        await conn.execute(statement)
    await conn.close()


async def test_a_server_as_it_should_be_gets_no_complaint(place: str) -> None:
    assert {result.level for result in (await of_store(place)).values()} == {OK}


async def test_a_server_that_does_not_wait_for_its_disk_is_refused() -> None:
    with PostgresServer(settings={"full_page_writes": "off", "autovacuum": "off"}) as reckless:
        url = reckless.database("shop")
        await PostgresSchema(url).migrate()
        found = await of_store(url)
    assert found["postgres-fsync"].level is ERROR
    assert found["postgres-full-page-writes"].level is WARN
    assert "for the server" in found["postgres-autovacuum"].text


async def test_writers_that_do_not_wait_for_their_commit_are_named(place: str, server: PostgresServer) -> None:
    role = f"hasty_{uuid4().hex[:8]}"
    await run(place, f"CREATE ROLE {role}", f"ALTER ROLE {role} SET synchronous_commit = off")
    found = (await of_store(place))["postgres-synchronous-commit"]
    assert (found.level, role in found.text) == (WARN, True)
    await run(place, f"DROP ROLE {role}")
    database = urlsplit(place).path[1:]
    await run(place, f"ALTER DATABASE {database} SET synchronous_commit = off")
    assert "every role" in (await of_store(place))["postgres-synchronous-commit"].text


async def test_a_database_that_may_not_be_written_is_refused(place: str) -> None:
    await run(place, f"ALTER DATABASE {urlsplit(place).path[1:]} SET default_transaction_read_only = on")
    assert (await of_store(place))["postgres-writable"].level is ERROR


async def test_an_outbox_that_is_not_vacuumed_is_noticed(place: str) -> None:
    await run(place, "ALTER TABLE outrider.outbox SET (autovacuum_enabled = off)")
    found = (await of_store(place))["postgres-autovacuum"]
    assert (found.level, "for the outbox" in found.text) == (WARN, True)


async def test_missing_rights_are_named_one_by_one(place: str) -> None:
    role = f"poor_{uuid4().hex[:8]}"
    await run(place, f"CREATE ROLE {role} LOGIN")
    [first, *_] = await diagnosed(store=place.replace("postgres@", f"{role}@"))
    assert (first.check, "USAGE on the schema" in first.remedy) == ("store-usable", True)
    grants = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA outrider TO"
    await run(place, f"GRANT USAGE ON SCHEMA outrider TO {role}", f"{grants} {role}")
    await run(place, f"REVOKE DELETE, UPDATE ON outrider.outbox FROM {role}")
    found = await of_store(place.replace("postgres@", f"{role}@"))
    assert found["postgres-rights"].level is ERROR
    assert found["postgres-rights"].text == "the role may not: DELETE on outbox, UPDATE on outbox"
    assert (found["postgres-partitions"].level, "does not own" in found["postgres-partitions"].text) == (WARN, True)
    await run(place, f"{grants} {role}")
    assert (await of_store(place.replace("postgres@", f"{role}@")))["postgres-rights"].level is OK


async def test_days_that_are_missing_from_the_archive_are_noticed_and_rows_without_a_day_too(place: str) -> None:
    await run(
        place,
        "INSERT INTO outrider.outbox_archive (id, event_id, event_type, payload, headers, key, priority, "
        "schema_version, attempts, created_at, sent_at) VALUES (1, gen_random_uuid(), 'a', '{}', '{}', 'k', 5, 1, 0, "
        "now(), now() + interval '1 year')",
    )
    found = (await of_store(place))["postgres-partitions"]
    assert (found.level, "default partition" in found.text) == (WARN, True)
    conn = await asyncpg.connect(place)
    names = await conn.fetch("SELECT relname FROM pg_class WHERE relname ~ '^outbox_archive_2' AND relkind = 'r'")
    await conn.close()
    await run(place, f"DROP TABLE outrider.{max(row['relname'] for row in names)}")
    assert "default" in (await of_store(place))["postgres-partitions"].text
    await run(place, *(f"DROP TABLE IF EXISTS outrider.{row['relname']}" for row in names))
    found = (await of_store(place))["postgres-partitions"]
    assert (found.level, "not there yet" in found.text) == (WARN, True)
    assert (await of_store(place, archive=False))["postgres-partitions"].level is OK


async def test_a_transaction_that_stays_open_is_named(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "LONG_SECONDS", 0.0)
    conn = await asyncpg.connect(place)
    async with conn.transaction():
        pid = await conn.fetchval("SELECT pg_backend_pid()")
        found = (await of_store(place))["postgres-transactions"]
    await conn.close()
    assert found.level is WARN
    assert f"pg_terminate_backend({pid})" in found.remedy


@pytest.fixture(scope="module", params=["0", "1"], ids=["last used first", "round robin"])
def pooler(request: pytest.FixtureRequest, server: PostgresServer) -> Iterator[PgBouncer]:
    # Session settings are ignored here, so that even a store without `pooled` can be opened.
    settings = {"server_round_robin": request.param, "ignore_startup_parameters": "default_transaction_isolation"}
    with PgBouncer(server, settings=settings) as running:
        yield running


@pytest.mark.pgbouncer
class TestPooler:
    async def test_a_store_that_was_told_is_warned_about_wakeups_only(self, place: str, pooler: PgBouncer) -> None:
        found = await of_store(_through(pooler, place), pooled=True)
        assert {check for check, result in found.items() if result.level is not OK} == {"postgres-wakeups"}
        assert "poll_seconds_max" in found["postgres-wakeups"].remedy

    async def test_a_store_that_was_not_told_is_refused(self, place: str, pooler: PgBouncer) -> None:
        found = {result.check: result for result in await diagnosed(store=_through(pooler, place))}
        assert found["postgres-pooler"].level is ERROR
        assert "pooled=true" in found["postgres-pooler"].remedy

    async def test_a_pooler_with_a_single_session_is_found_too(self, place: str, server: PostgresServer) -> None:
        with PgBouncer(server, settings={"default_pool_size": "1"}) as narrow:
            found = await of_store(_through(narrow, place), pooled=True)
        assert found["postgres-pooler"].level is OK
        assert found["postgres-wakeups"].level is WARN

    async def test_one_that_keeps_sessions_apart_is_none(self, place: str, server: PostgresServer) -> None:
        keeping = {"pool_mode": "session", "ignore_startup_parameters": "default_transaction_isolation"}
        with PgBouncer(server, settings=keeping) as polite:
            found = await of_store(_through(polite, place))
        assert found["postgres-pooler"].level is found["postgres-wakeups"].level is OK

    async def test_a_store_that_was_told_of_one_that_is_not_there_is_warned(self, place: str) -> None:
        found = await of_store(place, pooled=True)
        assert found["postgres-pooler"].level is WARN

    async def test_a_pooler_that_refuses_our_settings_is_named_with_the_fix(
        self, place: str, server: PostgresServer
    ) -> None:
        with PgBouncer(server) as strict:
            [found, *_] = await diagnosed(store=_through(strict, place))
            assert (found.level, found.check) == (ERROR, "store-usable")
            assert "pooled=true" in found.remedy
            results = await diagnosed(store=f"{_through(strict, place)}?pooled=true")
        assert "store-usable" not in {result.check for result in results if result.level is not OK}


def _through(pooler: PgBouncer, url: str) -> str:
    return urlsplit(pooler.url)._replace(path=urlsplit(url).path).geturl()


async def test_a_replica_is_refused(place: str, server: PostgresServer) -> None:
    with Replica(server) as replica:
        found = await diagnosed(store=urlsplit(replica.url)._replace(path=urlsplit(place).path).geturl())
    [refused] = [result for result in found if result.check == "store-usable"]
    assert (refused.level, refused.remedy) == (ERROR, "point the store at the primary")
    assert "read replica" in refused.text


async def test_a_store_that_is_not_installed_is_refused_and_the_broker_examined_all_the_same(
    server: PostgresServer,
) -> None:
    found = {result.check: result for result in await diagnosed(store=server.database("empty"))}
    assert found["store-schema"].level is ERROR
    assert found["store-schema"].remedy == "run: outrider db migrate"
    assert found["null-broker"].level is ERROR
    assert exit_code(list(found.values()), strict=False) == 1


async def test_a_server_that_does_not_answer_is_told_apart_and_the_other_side_examined() -> None:
    found = await diagnosed(store="postgresql://u:hunter2@127.0.0.1:1/x")
    assert {result.check for result in found} >= {"store-answers", "null-broker"}
    assert exit_code(found, strict=False) == 3
    assert "hunter2" not in str(found)


@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "statistics of an empty table"])
async def test_topics_are_read_from_the_start_of_each_lane_and_no_further(place: str, analyzed: bool) -> None:
    fill = "INSERT INTO outrider.outbox (event_type, aggregate_id, topic, payload) SELECT 'a', 'k' || i, 't', '{}'"
    await run(place, f"{fill} FROM generate_series(1, 30000) AS i", *(["ANALYZE outrider.outbox"] if analyzed else []))
    store, conn = await PostgresStore.open(place), await asyncpg.connect(place)
    plan = json.loads(await conn.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {store.sql['topics']}", 10, 1000))
    await conn.close()
    await store.close()
    reads = re.findall(r"'Relation Name': 'outbox', .*?'Actual Rows': (\d+)", str(plan))
    assert [int(rows) <= 10 for rows in reads] == [True]


async def test_what_is_staged_decides_which_topics_are_examined(place: str, kafka: str) -> None:
    conn = await asyncpg.connect(place)
    async with conn.transaction():
        await outrider.stage(conn, Event("order.placed", {}, topic="not-there", key="a"))
        await conn.execute("INSERT INTO outrider.outbox (event_type, payload) VALUES ('user.left', '{}')")
    await conn.close()
    chosen = config.load({"store": place, "broker": f"kafka://{kafka}", "topics": ["named"]}, {})
    found = {result.check: result for result in await check(chosen, ["given"])}
    assert found["kafka-topics"].text.startswith("named, given, events.user.left, not-there: not there")
