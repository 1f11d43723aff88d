"""Outrider's tables by a revision of Alembic: a real environment, on every engine, online and offline."""

from __future__ import annotations

import asyncio
import io
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from typer.testing import CliRunner

from outrider.app import open_schema, stage_sync
from outrider.cli import app
from outrider.errors import UsageError
from outrider.event import Event
from outrider.stores.migrations import Installer
from outrider.testing.servers.postgres import find_programs

ENV = """
from alembic import context
from sqlalchemy import Column, Integer, MetaData, NullPool, Table, create_engine
from outrider.alembic import skip_outrider

metadata = MetaData()
Table("orders", metadata, Column("id", Integer, primary_key=True))
url = context.config.get_main_option("sqlalchemy.url")
options = {"target_metadata": metadata, "include_object": skip_outrider, "include_schemas": True}
if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
"""
ASYNC_ENV = """
import asyncio
from alembic import context
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine


def migrate(connection):
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()


async def run():
    url = context.config.get_main_option("sqlalchemy.url").replace("+psycopg", "+asyncpg")
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"), poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(migrate)
    await engine.dispose()


asyncio.run(run())
"""
ORDERS = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "orders", None


def upgrade():
    op.create_table("orders", sa.Column("id", sa.Integer, primary_key=True))


def downgrade():
    op.drop_table("orders")
"""
TEMPLATE = "revision = ${repr(up_revision)}\\n${upgrades}"


class Environment:
    """A folder as `alembic init` makes one, with the team's own revision and ours after it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url, self.said = url, io.StringIO()
        self.versions = folder / "versions"
        self.versions.mkdir(parents=True)
        (folder / "env.py").write_text(ENV)
        (folder / "script.py.mako").write_text(TEMPLATE)
        (self.versions / "orders.py").write_text(ORDERS)
        self.config = Config(output_buffer=self.said)
        self.config.set_main_option("script_location", str(folder))
        driver = url.replace("postgresql://", "postgresql+psycopg://")
        self.config.set_main_option("sqlalchemy.url", driver.replace("%", "%%"))
        self.config.set_main_option("path_separator", "os")
        self.engine = sa.create_engine(driver, poolclass=sa.NullPool)

    def revise(self, *options: str) -> None:
        target = self.versions / "outrider.py"
        done = CliRunner().invoke(app, ["db", "alembic", "--revises", "orders", "--output", str(target), *options])
        assert done.exit_code == 0, done.output

    def rows(self, sql: str) -> list[Any]:
        with self.engine.connect() as conn:
            return [tuple(row) for row in conn.execute(sa.text(sql))]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    url: str = request.getfixturevalue("empty_database")
    return url


@pytest.fixture
def environment(url: str, tmp_path: Path) -> Environment:
    made = Environment(tmp_path / "migrations", url)
    made.revise()
    return made


def status(url: str, schema: str = "outrider") -> list[str]:
    return [each.state for each in asyncio.run(open_schema(url, schema=schema).status())]


def test_a_revision_installs_what_the_command_line_would(environment: Environment) -> None:
    command.upgrade(environment.config, "head")
    assert status(environment.url) == ["applied"] * 8
    assert asyncio.run(open_schema(environment.url).plan()) == []
    with environment.engine.begin() as conn:
        conn.execute(sa.text("INSERT INTO orders (id) VALUES (7)"))
        stage_sync(conn, Event("order.placed", {"id": 7}))
    command.upgrade(environment.config, "head")


def test_a_revision_passes_over_what_is_installed(environment: Environment) -> None:
    asyncio.run(open_schema(environment.url, lanes=5).migrate())
    command.upgrade(environment.config, "head")
    lanes = "outbox_lane" if environment.url.startswith("sqlite") else "outrider.outbox_lane"
    assert environment.rows(f"SELECT count(*) FROM {lanes}") == [(15,)]
    assert environment.rows("SELECT count(*) FROM alembic_version") == [(1,)]


def test_autogenerate_leaves_our_tables_alone(environment: Environment) -> None:
    command.upgrade(environment.config, "head")
    command.check(environment.config)
    with environment.engine.begin() as conn:
        conn.execute(sa.text("CREATE TABLE forgotten (id integer)"))
    with pytest.raises(CommandError, match="remove_table") as rejected:
        command.check(environment.config)
    assert "outbox" not in str(rejected.value)


def test_a_downgrade_takes_our_tables_away_unless_something_would_be_lost(environment: Environment) -> None:
    command.upgrade(environment.config, "head")
    with environment.engine.begin() as conn:
        stage_sync(conn, Event("order.placed", {"id": 7}))
    with pytest.raises(UsageError, match="1 events are not delivered"):
        command.downgrade(environment.config, "orders")
    assert status(environment.url) == ["applied"] * 8
    outbox = "outbox" if environment.url.startswith("sqlite") else "outrider.outbox"
    keys = "encryption_key" if environment.url.startswith("sqlite") else "outrider.encryption_key"
    row = f"INSERT INTO {keys} (key_id, wrapped, created_at, created_by) VALUES ('one', '{{}}', '2030-01-01', 'ann')"
    with environment.engine.begin() as conn:
        conn.execute(sa.text(row))
    with pytest.raises(UsageError, match="1 keys may be in use, and would be lost"):
        command.downgrade(environment.config, "orders")
    with environment.engine.begin() as conn:
        assert conn.execute(sa.text(f"DELETE FROM {keys}")).rowcount == 1
    with environment.engine.begin() as conn:
        assert conn.execute(sa.text(f"DELETE FROM {outbox}")).rowcount == 1
    command.downgrade(environment.config, "orders")
    assert status(environment.url) == ["pending"] * 8
    command.upgrade(environment.config, "head")
    assert status(environment.url) == ["applied"] * 8


def test_offline_texts_install_and_remove_everything(environment: Environment) -> None:
    command.upgrade(environment.config, "head", sql=True)
    _feed(environment.url, environment.said.getvalue())
    assert status(environment.url) == ["applied"] * 8
    environment.said.truncate(environment.said.seek(0))
    command.downgrade(environment.config, "head:orders", sql=True)
    _feed(environment.url, environment.said.getvalue())
    assert status(environment.url) == ["pending"] * 8


def test_an_asynchronous_environment_installs_and_removes_as_well(environment: Environment) -> None:
    (environment.versions.parent / "env.py").write_text(ASYNC_ENV)
    command.upgrade(environment.config, "head")
    assert status(environment.url) == ["applied"] * 8
    command.downgrade(environment.config, "orders")
    assert status(environment.url) == ["pending"] * 8


def test_an_interrupted_upgrade_leaves_no_step_without_its_record(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Installer, "record", lambda self, step: "this is no statement")
        with pytest.raises(sa.exc.DatabaseError):
            command.upgrade(environment.config, "head")
    command.upgrade(environment.config, "head")
    assert status(environment.url) == ["applied"] * 8


@pytest.mark.postgres
def test_another_schema_and_number_of_lanes_go_into_the_revision(empty_database: str, tmp_path: Path) -> None:
    made = Environment(tmp_path / "migrations", empty_database)
    made.revise("--schema", "shop_events", "--lanes", "4")
    command.upgrade(made.config, "head")
    assert status(made.url, "shop_events") == ["applied"] * 8
    assert made.rows("SELECT count(*) FROM shop_events.outbox_lane") == [(12,)]
    command.check(made.config)


def test_a_revision_is_not_written_over_another_file(tmp_path: Path) -> None:
    there = tmp_path / "there.py"
    there.write_text("precious")
    done = CliRunner().invoke(app, ["db", "alembic", "--output", str(there)])
    assert (done.exit_code, there.read_text()) == (2, "precious")
    assert CliRunner().invoke(app, ["db", "alembic", "--schema", "a-b"]).exit_code == 2
    assert CliRunner().invoke(app, ["db", "alembic", "--revises", "a b"]).exit_code == 2


def _feed(url: str, text: str) -> None:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as conn:
            conn.executescript(text)
        return
    done = subprocess.run(
        [str(find_programs() / "psql"), url, "-v", "ON_ERROR_STOP=1", "-q"],
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
