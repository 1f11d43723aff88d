"""The Django project on fresh databases, for every engine; migrated once, then copied."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.django_project.project import Project
from tests.support.postgres_databases import create_database, drop_database, name_of

ENGINES = [pytest.param("sqlite", id="sqlite"), pytest.param("postgres", id="postgres", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database that `manage.py migrate` has run on, to be copied."""
    url = f"sqlite:///{tmp_path_factory.mktemp('migrated') / 'shop.db'}"
    Project(url).manage("migrate")
    return url


@pytest.fixture(scope="session")
def migrated_postgres(admin_url: str) -> Iterator[str]:
    """A database that `manage.py migrate` has run on, to be copied."""
    url = asyncio.run(create_database(admin_url, _name()))
    Project(url).manage("migrate")
    yield url
    asyncio.run(drop_database(admin_url, name_of(url)))


@pytest.fixture(params=ENGINES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    """The project with all migrations applied."""
    template: str = request.getfixturevalue(f"migrated_{request.param}")
    if request.param == "sqlite":
        path = tmp_path / "shop.db"
        shutil.copy(template.removeprefix("sqlite:///"), path)
        yield Project(f"sqlite:///{path}")
        return
    admin = request.getfixturevalue("admin_url")
    url = asyncio.run(create_database(admin, _name(), name_of(template)))
    yield Project(url)
    asyncio.run(drop_database(admin, name_of(url)))


@pytest.fixture(params=ENGINES)
def bare_project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    """The project on an empty database."""
    if request.param == "sqlite":
        yield Project(f"sqlite:///{tmp_path / 'shop.db'}")
        return
    admin = request.getfixturevalue("admin_url")
    url = asyncio.run(create_database(admin, _name()))
    yield Project(url)
    asyncio.run(drop_database(admin, name_of(url)))


def _name() -> str:
    return f"django_{uuid4().hex[:12]}"
