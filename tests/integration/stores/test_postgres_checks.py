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
SESSION_SETTINGS = "default_transaction_isolation, statement_timeout, enable_seqscan, jit"
"""The parameters that a store without `pooled` sends when it connects; a pooler rejects those that it cannot track."""


class Replica(PostgresServer):
    """A server that follows another."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self._primary = primary

    def create(self) -> None:
        """Copy the primary."""
        url = ["--host=127.0.0.1", f"--port={self._primary.port}", "--username=postgres"]
        copy = [str(self.programs / "pg_basebackup"), *url, "--pgdata", str(self.home / "data"), "-R", "-c", "fast"]
        self.run(copy, "pg_basebackup")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server as it should be."""
    with PostgresServer(fsync=True) as running:
        yield running


@pytest.fixture
async def url(server: PostgresServer) -> str:
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


async def test_a_server_as_it_should_be_gets_no_complaint(url: str) -> None:
    assert {result.level for result in (await of_store(url)).values()} == {OK}


async def test_a_server_that_does_not_wait_for_its_disk_is_rejected() -> None:
    with PostgresServer(settings={"full_page_writes": "off", "autovacuum": "off"}) as reckless:
        url = reckless.database("shop")
        await PostgresSchema(url).migrate()
        found = await of_store(url)
    assert found["postgres-fsync"].level is ERROR
    assert found["postgres-full-page-writes"].level is WARN
    assert "for the server" in found["postgres-autovacuum"].text


async def test_writers_that_do_not_wait_for_their_commit_are_named(url: str, server: PostgresServer) -> None:
    role = f"hasty_{uuid4().hex[:8]}"
    await run(url, f"CREATE ROLE {role}", f"ALTER ROLE {role} SET synchronous_commit = off")
    found = (await of_store(url))["postgres-synchronous-commit"]
    assert (found.level, role in found.text) == (WARN, True)
    await run(url, f"DROP ROLE {role}")
    database = urlsplit(url).path[1:]
    await run(url, f"ALTER DATABASE {database} SET synchronous_commit = off")
    assert "every role" in (await of_store(url))["postgres-synchronous-commit"].text


async def test_a_database_that_may_not_be_written_is_rejected(url: str) -> None:
    await run(url, f"ALTER DATABASE {urlsplit(url).path[1:]} SET default_transaction_read_only = on")
    assert (await of_store(url))["postgres-writable"].level is ERROR


async def test_an_outbox_that_is_not_vacuumed_is_reported(url: str) -> None:
    await run(url, "ALTER TABLE outrider.outbox SET (autovacuum_enabled = off)")
    found = (await of_store(url))["postgres-autovacuum"]
    assert (found.level, "for the outbox" in found.text) == (WARN, True)


async def test_missing_rights_are_named_one_by_one(url: str) -> None:
    role = f"poor_{uuid4().hex[:8]}"
    await run(url, f"CREATE ROLE {role} LOGIN")
    [first, *_] = await diagnosed(store=url.replace("postgres@", f"{role}@"))
    assert (first.check, "USAGE on the schema" in first.remedy) == ("store-usable", True)
    grants = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA outrider TO"
    await run(url, f"GRANT USAGE ON SCHEMA outrider TO {role}", f"{grants} {role}")
    await run(url, f"REVOKE DELETE, UPDATE ON outrider.outbox FROM {role}")
    found = await of_store(url.replace("postgres@", f"{role}@"))
    assert found["postgres-rights"].level is ERROR
    lacking = "DELETE on outbox, UPDATE on outbox, EXECUTE on outbox_operation_prune"
    assert found["postgres-rights"].text == f"the role may not: {lacking}"
    assert (found["postgres-partitions"].level, "does not own" in found["postgres-partitions"].text) == (WARN, True)
    prune = "outrider.outbox_operation_prune(bigint, timestamptz, bigint, timestamptz, bytea, bytea)"
    await run(url, f"{grants} {role}", f"GRANT EXECUTE ON FUNCTION {prune} TO {role}")
    found = await of_store(url.replace("postgres@", f"{role}@"))
    assert (found["postgres-rights"].level, found["postgres-sequence"].level) == (OK, WARN)
    assert found["postgres-sequence"].remedy.startswith("GRANT SELECT ON SEQUENCE outrider.outbox_id_seq TO")
    await run(url, f"GRANT SELECT ON SEQUENCE outrider.outbox_id_seq TO {role}")
    assert (await of_store(url.replace("postgres@", f"{role}@")))["postgres-sequence"].level is OK


async def test_missing_partitions_of_the_archive_are_reported_and_so_are_rows_without_a_partition(url: str) -> None:
    await run(
        url,
        "INSERT INTO outrider.outbox_archive (id, event_id, event_type, payload, headers, key, priority, "
        "schema_version, attempts, created_at, sent_at) VALUES (1, gen_random_uuid(), 'a', '{}', '{}', 'k', 5, 1, 0, "
        "now(), now() + interval '1 year')",
    )
    found = (await of_store(url))["postgres-partitions"]
    assert (found.level, "default partition" in found.text) == (WARN, True)
    conn = await asyncpg.connect(url)
    names = await conn.fetch("SELECT relname FROM pg_class WHERE relname ~ '^outbox_archive_2' AND relkind = 'r'")
    await conn.close()
    await run(url, f"DROP TABLE outrider.{max(row['relname'] for row in names)}")
    assert "default" in (await of_store(url))["postgres-partitions"].text
    await run(url, *(f"DROP TABLE IF EXISTS outrider.{row['relname']}" for row in names))
    found = (await of_store(url))["postgres-partitions"]
    assert (found.level, "not there yet" in found.text) == (WARN, True)
    assert (await of_store(url, archive=False))["postgres-partitions"].level is OK


async def test_a_transaction_that_stays_open_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "LONG_SECONDS", 0.0)
    conn = await asyncpg.connect(url)
    async with conn.transaction():
        pid = await conn.fetchval("SELECT pg_backend_pid()")
        found = (await of_store(url))["postgres-transactions"]
    await conn.close()
    assert found.level is WARN
    assert f"pg_terminate_backend({pid})" in found.remedy


@pytest.fixture(scope="module", params=["0", "1"], ids=["last used first", "round robin"])
def pooler(request: pytest.FixtureRequest, server: PostgresServer) -> Iterator[PgBouncer]:
    # Session settings are ignored here, so that even a store without `pooled` can be opened.
    settings = {"server_round_robin": request.param, "ignore_startup_parameters": SESSION_SETTINGS}
    with PgBouncer(server, settings=settings) as running:
        yield running


@pytest.mark.pgbouncer
class TestPooler:
    async def test_behind_a_pooler_a_pooled_store_needs_no_notifications(self, url: str, pooler: PgBouncer) -> None:
        found = await of_store(_through(pooler, url), pooled=True)
        assert {check for check, result in found.items() if result.level is not OK} == set()
        assert "id sequence" in found["postgres-wakeups"].text

    async def test_behind_a_pooler_a_sequence_that_does_not_show_every_insert_is_reported(
        self, url: str, pooler: PgBouncer
    ) -> None:
        await run(url, "ALTER SEQUENCE outrider.outbox_id_seq CACHE 10")
        found = await of_store(_through(pooler, url), pooled=True)
        assert found["postgres-sequence"].level is found["postgres-wakeups"].level is WARN
        assert found["postgres-sequence"].remedy == "ALTER SEQUENCE outrider.outbox_id_seq CACHE 1"

    async def test_behind_a_pooler_a_store_without_pooled_is_rejected(self, url: str, pooler: PgBouncer) -> None:
        found = {result.check: result for result in await diagnosed(store=_through(pooler, url))}
        assert found["postgres-pooler"].level is ERROR
        assert "pooled=true" in found["postgres-pooler"].remedy

    async def test_a_pooler_with_a_single_session_is_found_too(self, url: str, server: PostgresServer) -> None:
        with PgBouncer(server, settings={"default_pool_size": "1"}) as narrow:
            found = await of_store(_through(narrow, url), pooled=True)
        assert found["postgres-pooler"].level is found["postgres-wakeups"].level is OK

    async def test_one_that_keeps_sessions_apart_is_none(self, url: str, server: PostgresServer) -> None:
        keeping = {"pool_mode": "session", "ignore_startup_parameters": SESSION_SETTINGS}
        with PgBouncer(server, settings=keeping) as polite:
            found = await of_store(_through(polite, url))
        assert found["postgres-pooler"].level is found["postgres-wakeups"].level is OK

    async def test_a_pooled_store_without_a_pooler_is_warned(self, url: str) -> None:
        found = await of_store(url, pooled=True)
        assert found["postgres-pooler"].level is WARN

    async def test_a_pooler_that_rejects_our_settings_is_named_with_the_fix(
        self, url: str, server: PostgresServer
    ) -> None:
        with PgBouncer(server) as strict:
            [found, *_] = await diagnosed(store=_through(strict, url))
            assert (found.level, found.check) == (ERROR, "store-usable")
            assert "pooled=true" in found.remedy
            results = await diagnosed(store=f"{_through(strict, url)}?pooled=true")
        assert "store-usable" not in {result.check for result in results if result.level is not OK}


def _through(pooler: PgBouncer, url: str) -> str:
    return urlsplit(pooler.url)._replace(path=urlsplit(url).path).geturl()


async def test_a_replica_is_rejected(url: str, server: PostgresServer) -> None:
    with Replica(server) as replica:
        found = await diagnosed(store=urlsplit(replica.url)._replace(path=urlsplit(url).path).geturl())
    [result] = [result for result in found if result.check == "store-usable"]
    assert (result.level, result.remedy) == (ERROR, "point the store at the primary")
    assert "read replica" in result.text


async def test_a_store_that_is_not_installed_is_rejected_and_the_broker_is_still_checked(
    server: PostgresServer,
) -> None:
    found = {result.check: result for result in await diagnosed(store=server.database("empty"))}
    assert found["store-schema"].level is ERROR
    assert found["store-schema"].remedy == "run: outrider db migrate"
    assert found["null-broker"].level is ERROR
    assert exit_code(list(found.values()), strict=False) == 1


async def test_a_server_that_does_not_answer_is_distinguished_and_the_other_side_is_checked() -> None:
    found = await diagnosed(store="postgresql://u:hunter2@127.0.0.1:1/x")
    assert {result.check for result in found} >= {"store-answers", "null-broker"}
    assert exit_code(found, strict=False) == 3
    assert "hunter2" not in str(found)


@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "statistics of an empty table"])
async def test_topics_are_read_from_the_start_of_each_lane_and_no_further(url: str, analyzed: bool) -> None:
    fill = "INSERT INTO outrider.outbox (event_type, aggregate_id, topic, payload) SELECT 'a', 'k' || i, 't', '{}'"
    await run(url, f"{fill} FROM generate_series(1, 30000) AS i", *(["ANALYZE outrider.outbox"] if analyzed else []))
    store, conn = await PostgresStore.open(url), await asyncpg.connect(url)
    plan = json.loads(await conn.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {store.sql['topics']}", 10, 1000))
    await conn.close()
    await store.close()
    reads = re.findall(r"'Relation Name': 'outbox', .*?'Actual Rows': (\d+)", str(plan))
    assert [int(rows) <= 10 for rows in reads] == [True]


async def test_staged_events_decide_which_topics_are_checked(url: str, kafka: str) -> None:
    conn = await asyncpg.connect(url)
    async with conn.transaction():
        await outrider.stage(conn, Event("order.placed", {}, topic="not-there", key="a"))
        await conn.execute("INSERT INTO outrider.outbox (event_type, payload) VALUES ('user.left', '{}')")
    await conn.close()
    chosen = config.load({"store": url, "broker": f"kafka://{kafka}", "topics": ["named"]}, {})
    found = {result.check: result for result in await check(chosen, ["given"])}
    assert found["kafka-topics"].text.startswith("named, given, events.user.left, not-there: not there")
