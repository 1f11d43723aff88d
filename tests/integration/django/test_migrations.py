"""Django's migrations and `outrider db migrate` install the same, and either may come first."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from typing import Any

import asyncpg
import pytest

from outrider.app import open_schema
from outrider.stores import migrations
from tests.django_project.project import Project


def status(project: Project, code: int = 0) -> list[str]:
    output = json.loads(project.manage("outrider", "db", "status", "--json", code=code).stdout)
    assert output["ready"] == (code == 0)
    return [each["state"] for each in output["migrations"]]


def contents(url: str) -> list[tuple[Any, ...]]:
    """Return everything that defines the schema, but for when it was made."""
    if url.startswith("sqlite"):
        return run(url, "SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite%' ORDER BY name")
    return (
        run(
            url,
            "SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, c.reloptions::text, "
            "pg_get_expr(d.adbin, d.adrelid), a.attgenerated::text, a.attidentity::text FROM pg_attribute a "
            "JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (c.oid, a.attnum) "
            "WHERE c.relnamespace = 'outrider'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, 2",
        )
        + run(
            url,
            "SELECT 'definition', text FROM ("
            "SELECT indexdef FROM pg_indexes WHERE schemaname = 'outrider' "
            "UNION ALL SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'outrider'::regnamespace "
            "UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid IN "
            "(SELECT oid FROM pg_class WHERE relnamespace = 'outrider'::regnamespace) "
            "UNION ALL SELECT conrelid::regclass::text || pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE connamespace = 'outrider'::regnamespace) AS found (text) ORDER BY 2",
        )
        + run(url, "SELECT lane, owner, epoch FROM outrider.outbox_lane ORDER BY lane")
    )


def run(url: str, sql: str) -> list[tuple[Any, ...]]:
    """Run statements; return the rows of a query."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as conn:
            if sql.startswith("SELECT"):
                return conn.execute(sql).fetchall()
            conn.executescript(sql)
            return []

    async def asked() -> list[tuple[Any, ...]]:
        conn = await asyncpg.connect(url)
        try:
            if sql.startswith("SELECT"):
                return [tuple(row) for row in await conn.fetch(sql)]
            await conn.execute(sql)
            return []
        finally:
            await conn.close()

    return asyncio.run(asked())


def remains(url: str) -> list[tuple[Any, ...]]:
    """Name what is left of Outrider."""
    if url.startswith("sqlite"):
        return run(url, "SELECT name FROM sqlite_schema WHERE name LIKE '%outbox%' OR name LIKE '%saga%'")
    return run(
        url,
        "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace('outrider') "
        "UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = to_regnamespace('outrider')",
    )


def test_django_installs_what_the_command_line_installs(bare_project: Project) -> None:
    bare_project.manage("migrate", "outrider")
    ours = contents(bare_project.url)
    bare_project.manage("migrate", "outrider", "zero")
    assert remains(bare_project.url) == []
    bare_project.manage("outrider", "db", "migrate")
    assert [row for row in contents(bare_project.url) if row not in ours] == []
    assert len(contents(bare_project.url)) == len(ours)


def test_the_command_line_finds_nothing_to_do_after_django(project: Project) -> None:
    assert status(project) == ["applied"] * 8
    assert "nothing to do" in project.manage("outrider", "db", "migrate").stdout
    assert "No migrations to apply" in project.manage("migrate").stdout
    assert "No changes detected" in project.manage("makemigrations", "--check").stdout


def test_django_passes_over_what_the_command_line_has_installed(bare_project: Project) -> None:
    asyncio.run(open_schema(bare_project.url, lanes=7).migrate())
    before = contents(bare_project.url)
    output = bare_project.outrider(LANES=9).manage("migrate").stdout
    assert "Applying outrider.0003_saga... OK" in output
    assert [row for row in contents(bare_project.url) if row in before] == before
    assert status(bare_project) == ["applied"] * 8


def test_django_continues_a_migration_that_the_command_line_interrupted(
    bare_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = migrations.steps
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "steps", lambda *args: every(*args)[:21])
        asyncio.run(open_schema(bare_project.url, lanes=7).migrate())
    assert status(bare_project, code=1) == ["partial", *["pending"] * 7]
    bare_project.manage("migrate", "outrider")
    assert status(bare_project) == ["applied"] * 8
    table = "outbox_lane" if bare_project.url.startswith("sqlite") else "outrider.outbox_lane"
    # Seven lanes in each of three bands, as the first installation said.
    assert run(bare_project.url, f"SELECT count(*) FROM {table}") == [(21,)]


def test_the_number_of_lanes_comes_from_the_settings(bare_project: Project) -> None:
    bare_project.outrider(LANES=5).manage("migrate", "outrider")
    table = "outbox_lane" if bare_project.url.startswith("sqlite") else "outrider.outbox_lane"
    assert run(bare_project.url, f"SELECT count(*) FROM {table}") == [(15,)]


def test_a_migration_that_was_applied_with_another_text_is_rejected(bare_project: Project) -> None:
    asyncio.run(open_schema(bare_project.url).migrate())
    table = "outrider_migration" if bare_project.url.startswith("sqlite") else "outrider.outrider_migration"
    run(bare_project.url, f"UPDATE {table} SET checksum = 'another' WHERE step = 'inbox_stream'")
    output = bare_project.manage("migrate", "outrider", code=1).stderr
    assert output.startswith("CommandError: migration 0002_inbox, step inbox_stream, was applied with another text")


def test_what_sqlmigrate_writes_installs_everything(bare_project: Project) -> None:
    for number in ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0009"):
        run(bare_project.url, bare_project.manage("sqlmigrate", "outrider", number).stdout)
    assert status(bare_project) == ["applied"] * 8
    bare_project.manage("migrate")
    for number in ("0009", "0007", "0006", "0005", "0004", "0003", "0002", "0001"):
        run(bare_project.url, bare_project.manage("sqlmigrate", "outrider", number, "--backwards").stdout)
    assert remains(bare_project.url) == []


def test_going_back_is_rejected_while_something_would_be_lost(project: Project) -> None:
    project.scenario("staging.commit")
    project.manage("migrate", "outrider", "0001")
    output = project.manage("migrate", "outrider", "zero", code=1).stderr
    assert "0001_outbox cannot be taken back: 1 events are not delivered or are dead letters" in output
    project.manage("outrider", "relay", "--until-empty", "--broker", "null://")
    project.manage("migrate", "outrider", "zero")
    assert remains(project.url) == []
    project.manage("migrate", "outrider")
    project.scenario("staging.silent", SHOP_OUTRIDER='{"WAKE": false}')


@pytest.mark.postgres
@pytest.mark.parametrize("bare_project", ["postgres"], indirect=True)
def test_the_archive_has_its_partitions_from_the_first_moment(bare_project: Project) -> None:
    bare_project.outrider(SCHEMA="shop_events").manage("migrate", "outrider")
    found = run(
        bare_project.url, "SELECT count(*) FROM pg_inherits WHERE inhparent = 'shop_events.outbox_archive'::regclass"
    )
    # Today, seven days ahead, and the net under them.
    assert found == [(9,)]
    asyncio.run(open_schema(bare_project.url, schema="shop_events").migrate())
