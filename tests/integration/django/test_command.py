"""`manage.py outrider`: our command line with the project's settings, and what the system checks find in them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, urlsplit

import asyncpg
import pytest

from tests.django_project.project import Project
from tests.support.migrations import MIGRATIONS


def test_a_relay_publishes_to_the_broker_of_the_settings(project: Project, tmp_path: Path) -> None:
    project.scenario("staging.commit")
    log = tmp_path / "log.db"
    shop = project.outrider(BROKER=f"embedded:///{log}")
    assert "1 event confirmed" in shop.manage("outrider", "relay", "--until-empty").stdout
    with closing(sqlite3.connect(log)) as conn:
        assert conn.execute("SELECT count(*) FROM log").fetchone() == (1,)
    sent = json.loads(shop.manage("outrider", "events", "list", "--state", "sent", "--json").stdout)
    assert [event["key"] for event in sent] == ["A-1"]


def test_processes_that_a_command_starts_have_the_project_too(project: Project) -> None:
    project.scenario("sagas.start")
    output = project.manage(
        *("outrider", "saga", "run", "tests.django_project.shop.sagas:sagas", "--processes", "2", "--until-idle", "1"),
        *("--broker", "null://"),
    )
    assert "1 completed" in output.stdout
    project.scenario("sagas.ended")


@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_options_win_over_variables_and_those_over_the_settings(project: Project) -> None:
    shop = project.outrider(BROKER="kafka://from-the-settings")
    show = ("outrider", "config", "show", "--json")

    def broker(*options: str, variable: str = "") -> str:
        rows = json.loads(shop.manage(*show, *options, OUTRIDER_BROKER=variable).stdout)
        return str(next(row["value"] for row in rows if row["setting"] == "broker"))

    assert broker() == "kafka://from-the-settings"
    assert broker(variable="kafka://from-a-variable") == "kafka://from-a-variable"
    assert broker("--broker", "null://", variable="kafka://from-a-variable") == "null://"


@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_help_and_exit_codes_are_those_of_the_command_line(project: Project) -> None:
    for words in ((), ("relay",), ("db",), ("db", "status"), ("dead-letters", "replay")):
        assert " ".join(("manage.py outrider", *words)) in project.manage("outrider", *words, "--help").stdout
    assert "manage.py outrider" in project.manage("help", "outrider").stdout
    nobody = "0190b3a6-7c1e-7b32-9d7e-2f1a5c3b4d5e"
    assert "no event" in project.manage("outrider", "events", "show", nobody, code=1).stderr
    assert "not an event id" in project.manage("outrider", "events", "show", "x", code=2).stderr
    assert "no broker given" in project.manage("outrider", "relay", "--until-empty", code=2).stderr
    options = ("--settings=tests.django_project.settings", "--pythonpath", ".")
    project.manage("outrider", "db", "status", *options)


@pytest.mark.postgres
@pytest.mark.parametrize("project", ["postgres"], indirect=True)
def test_a_password_with_every_awkward_character_reaches_the_store(project: Project, admin_url: str) -> None:
    role, password = "sh@p/er:%?#", "p@s/s:%?#[]& ='\\"
    name = urlsplit(project.url).path[1:]

    async def grant() -> None:
        admin = await asyncpg.connect(project.url)
        literal = password.replace("'", "''")
        await admin.execute(f"CREATE ROLE \"{role}\" LOGIN PASSWORD '{literal}'")
        await admin.execute(f'GRANT ALL ON SCHEMA outrider TO "{role}"')
        await admin.execute(f'GRANT ALL ON ALL TABLES IN SCHEMA outrider TO "{role}"')
        await admin.close()

    async def forget() -> None:
        admin = await asyncpg.connect(project.url)
        await admin.execute(f'DROP OWNED BY "{role}"')
        await admin.execute(f'DROP ROLE "{role}"')
        await admin.close()

    asyncio.run(grant())
    try:
        parts = urlsplit(project.url)
        user = f"{quote(role, safe='')}:{quote(password, safe='')}"
        shop = Project(f"postgresql://{user}@{parts.hostname}:{parts.port}/{name}")
        assert json.loads(shop.manage("outrider", "db", "status", "--json").stdout)["ready"]
        rows = json.loads(shop.manage("outrider", "config", "show", "--json").stdout)
        shown = next(row["value"] for row in rows if row["setting"] == "store")
        assert quote(password, safe="") not in shown
        shop.scenario("database_url.reads_back", SHOP_EXPECTED=json.dumps([role, password, name]))
    finally:
        asyncio.run(forget())


@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_the_address_of_a_database_is_shown_as_a_url(project: Project) -> None:
    project.scenario("database_url.forms")


@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_an_unknown_setting_is_named_with_the_nearest(project: Project) -> None:
    output = project.outrider(DATABSE="default").manage("check", code=1).stderr
    assert "(outrider.E001) OUTRIDER has no key 'DATABSE'." in output
    assert "Did you mean DATABASE?" in output
    assert "DATABASE?" in project.outrider(DATABSE="default").manage("outrider", "events", "list", code=2).stderr
    wrong = {"DATABASE": "nowhere", "SCHEMA": "a-b", "LANES": 5000, "WAKE": "yes", "BROKER": 7}
    output = project.outrider(**wrong).manage("check", code=1).stderr
    for key in wrong:
        assert f"OUTRIDER['{key}']" in output


def test_tables_that_are_absent_are_named_with_the_remedy(bare_project: Project) -> None:
    output = bare_project.manage("check", "--database", "default").stderr
    assert "(outrider.W004)" in output
    assert f"{', '.join(MIGRATIONS)} to be installed" in output
    assert "manage.py migrate outrider" in output
    assert "outrider" not in bare_project.manage("check").stderr
    bare_project.manage("migrate")
    assert "no issues" in bare_project.manage("check", "--database", "default").stdout


@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_a_setting_that_endangers_a_guarantee_is_warned_about(project: Project) -> None:
    output = project.manage("check", SHOP_TRANSACTION_MODE="").stderr
    assert "(outrider.W003)" in output
    assert '{"transaction_mode": "IMMEDIATE"}' in output
    extra = json.dumps({"AUTOCOMMIT": False})
    assert "(outrider.W001)" in project.manage("check", SHOP_DATABASE_EXTRA=extra).stderr
    extra = json.dumps({"ENGINE": "django.db.backends.dummy"})
    assert "(outrider.E002)" in project.manage("check", SHOP_DATABASE_EXTRA=extra, code=1).stderr


@pytest.mark.postgres
@pytest.mark.parametrize("project", ["postgres"], indirect=True)
def test_a_driver_that_is_absent_or_of_another_time_is_named(project: Project) -> None:
    assert "outrider.E003" in project.scenario("database_url.checked", SHOP_WITHOUT="psycopg")
    assert "outrider.W002" in project.scenario("database_url.checked", SHOP_WITHOUT="asyncpg")
    assert project.scenario("database_url.checked").strip() == "[]"
