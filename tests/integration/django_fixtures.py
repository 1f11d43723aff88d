"""The Django project on fresh databases, for every engine; migrated once, then copied."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from tests.django_project.project import Project

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
    url = asyncio.run(_create(admin_url))
    Project(url).manage("migrate")
    yield url
    asyncio.run(_drop(admin_url, url))


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
    url = asyncio.run(_create(admin, f"TEMPLATE {urlsplit(template).path[1:]}"))
    yield Project(url)
    asyncio.run(_drop(admin, url))


@pytest.fixture(params=ENGINES)
def bare_project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    """The project on an empty database."""
    if request.param == "sqlite":
        yield Project(f"sqlite:///{tmp_path / 'shop.db'}")
        return
    admin = request.getfixturevalue("admin_url")
    url = asyncio.run(_create(admin))
    yield Project(url)
    asyncio.run(_drop(admin, url))


async def _create(admin_url: str, options: str = "") -> str:
    name = f"django_{uuid4().hex[:12]}"
    admin = await asyncpg.connect(admin_url)
    await admin.execute(f"CREATE DATABASE {name} {options}")
    await admin.close()
    return urlsplit(admin_url)._replace(path=f"/{name}").geturl()


async def _drop(admin_url: str, url: str) -> None:
    admin = await asyncpg.connect(admin_url)
    await admin.execute(f"DROP DATABASE {urlsplit(url).path[1:]} WITH (FORCE)")
    await admin.close()
