"""The page on Alembic: its revision and its `env.py` are put into an environment, and used."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config

from outrider.alembic import revision
from outrider.app import open_schema
from tests.support.doc_snippets import ROOT, snippets

REVISION, ENV = (snippet.code for snippet in snippets("python", pages=[ROOT / "docs" / "how-to" / "alembic.md"]))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    found: str = request.getfixturevalue("empty_database")
    return found


@pytest.fixture
def config(url: str, tmp_path: Path) -> Config:
    """An environment that consists of what the page shows."""
    folder = tmp_path / "migrations"
    (folder / "versions").mkdir(parents=True)
    (folder / "env.py").write_text(ENV)
    (folder / "versions" / "outrider.py").write_text(REVISION)
    config = Config(output_buffer=io.StringIO(), stdout=io.StringIO())
    config.set_main_option("script_location", str(folder))
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", url.replace("postgresql:", "postgresql+psycopg:").replace("%", "%%"))
    return config


def states(url: str) -> set[str]:
    return {each.state for each in asyncio.run(open_schema(url).status())}


def test_the_revision_installs_autogenerate_wants_nothing_and_a_downgrade_removes(url: str, config: Config) -> None:
    command.upgrade(config, "head")
    assert states(url) == {"applied"}
    command.check(config)
    command.downgrade(config, "base")
    assert states(url) == {"pending"}


def test_the_revision_is_what_the_command_prints() -> None:
    assert revision("8f2a", revises=None, schema="outrider", lanes=32) == REVISION
