"""Staging from a Django project: transactions, savepoints, views, waking, a second database, Django's own tests."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from outrider.privacy import DataKey
from tests.django_project.project import Project


def test_an_event_is_there_with_its_order(project: Project) -> None:
    project.scenario("staging.commit")


def test_an_event_goes_with_its_order_and_with_its_savepoint(project: Project) -> None:
    project.scenario("staging.rollback")


def test_nothing_is_staged_outside_of_atomic_and_only_a_transaction_writes_rows(project: Project) -> None:
    project.scenario("staging.usage_errors")


def test_with_autocommit_off_an_event_is_committed_or_rolled_back_with_the_open_transaction(project: Project) -> None:
    project.scenario("staging.manual", SHOP_DATABASE_EXTRA=json.dumps({"AUTOCOMMIT": False}))


def test_a_view_stages_in_the_transaction_of_its_request(project: Project) -> None:
    project.scenario("views.atomic_requests", SHOP_DATABASE_EXTRA=json.dumps({"ATOMIC_REQUESTS": True}))


def test_an_asynchronous_view_stages_in_a_block_on_the_thread_of_its_request(project: Project) -> None:
    project.scenario("views.asynchronous")


def test_a_test_of_django_takes_its_events_back(project: Project) -> None:
    output = project.manage("test", "tests.django_project.shop", "-v", "2").stderr
    assert "Ran 3 tests" in output


def test_the_command_runs_inside_the_project(project: Project) -> None:
    project.scenario("staging.commands")


def test_events_and_sagas_are_checked_and_encrypted_with_the_payloads_of_the_settings(project: Project) -> None:
    configured = project.outrider(PAYLOADS="tests.django_project.shop.payloads:payloads")
    configured.scenario("staging.payloads", SHOP_KEYS=DataKey.new().text)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("shop", "OUTRIDER['PAYLOADS'] = 'shop' names no object"),
        ("absent.shop:payloads", "OUTRIDER['PAYLOADS']: absent.shop:payloads cannot be imported"),
        (
            "tests.django_project.shop.sagas:sagas",
            "OUTRIDER['PAYLOADS']: tests.django_project.shop.sagas:sagas is no Pay",
        ),
    ],
)
@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_payloads_that_cannot_be_found_are_named_by_the_system_check(project: Project, target: str, said: str) -> None:
    checked = project.outrider(PAYLOADS=target).manage("check", code=1)
    assert f"(outrider.E001) {said}" in checked.stderr.replace("\n", " ")


@pytest.mark.postgres
@pytest.mark.parametrize("project", ["postgres"], indirect=True)
def test_relays_are_woken_after_the_commit_unless_configured_otherwise(project: Project) -> None:
    project.scenario("staging.waking")
    project.outrider(WAKE=False).scenario("staging.silent")


def test_a_project_without_users_and_without_asyncpg_migrates_and_stages(bare_project: Project) -> None:
    bare_project.scenario("staging.plain", SHOP_PLAIN="yes", SHOP_WITHOUT="asyncpg")


def test_events_go_to_the_database_that_the_settings_name(bare_project: Project, tmp_path: Path) -> None:
    second = f"sqlite:///{tmp_path / 'second.db'}"
    # The other engine, so that a table name with a schema would fail.
    split = Project(second, SHOP_SECOND_DATABASE=bare_project.url).outrider(DATABASE="second", SCHEMA="shop_events")
    split.manage("migrate")
    assert "0001_outbox" in split.manage("check", "--database", "second").stderr
    split.manage("migrate", "--database", "second")
    split.scenario("staging.second")
    assert json.loads(split.manage("outrider", "events", "list", "--json").stdout)[1]["key"] == "A-2"
    with closing(sqlite3.connect(second.removeprefix("sqlite:///"))) as conn:
        assert conn.execute("SELECT count(*) FROM sqlite_schema WHERE name LIKE 'outbox%'").fetchone() == (0,)
