"""System checks: find settings that break Outrider's guarantees, before any event is staged."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import django
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import DatabaseError, connections

from outrider.django import conf
from outrider.django.migration_operations import VENDORS, connection_installer, perform

MIGRATE = "Run: manage.py migrate outrider; if Django has recorded it as applied, manage.py outrider db migrate."


def check_settings(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Check the keys and values of OUTRIDER.

    ```python
    register(check_settings)
    ```
    """
    found = conf.problems(getattr(settings, conf.NAME, {})) or conf.payloads_problems()
    return [Error(f"{problem.text}.", hint=_sentence(problem.remedy), id="outrider.E001") for problem in found]


def check_database(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Check the database that OUTRIDER["DATABASE"] names, without a query.

    ```python
    register(check_place)
    ```
    """
    if conf.problems(getattr(settings, conf.NAME, {})):
        return []
    alias = conf.current().database
    connection = connections[alias]
    if connection.vendor not in VENDORS:
        text = f"Outrider cannot work in DATABASES[{alias!r}], which is {connection.vendor}; its migrations do nothing."
        return [Error(text, hint='Use PostgreSQL or SQLite, and name the alias in OUTRIDER["DATABASE"].', id=f"{_E}2")]
    return [*_autocommit(connection), *(_postgres() if connection.vendor == "postgresql" else _sqlite(connection))]


def check_installed(app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Check in the database whether Outrider's tables exist and are up to date.

    ```python
    register(check_installed, Tags.database)
    ```
    """
    if conf.problems(getattr(settings, conf.NAME, {})):
        return []
    chosen = conf.current()
    connection = connections[chosen.database]
    if chosen.database not in (databases or ()) or connection.vendor not in VENDORS:
        return []
    try:
        found = perform(connection, connection_installer(connection).status())
    except DatabaseError as error:
        return [
            Warning(f"Outrider's tables cannot be looked at: {error}", hint="Check the role's rights.", id=f"{_W}5")
        ]
    missing = [each.migration for each in found if each.state != "applied"]
    if not missing:
        return []
    text = f"Outrider's tables in {chosen.database!r} are not up to date: {', '.join(missing)} to be installed."
    return [Warning(text, hint=MIGRATE, id=f"{_W}4")]


_E, _W = "outrider.E00", "outrider.W00"


def _autocommit(connection: Any) -> list[CheckMessage]:
    if connection.settings_dict.get("AUTOCOMMIT", True):
        return []
    text = f"DATABASES[{connection.alias!r}] has AUTOCOMMIT off, so Django cannot tell when a transaction commits."
    hint = "Leave AUTOCOMMIT on and use transaction.atomic(); otherwise relays are woken only inside of it."
    return [Warning(text, hint=hint, id=f"{_W}1")]


def _postgres() -> list[CheckMessage]:
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    found: list[CheckMessage] = []
    if not is_psycopg3:
        text = "Django talks to PostgreSQL by psycopg2, through which Outrider cannot stage."
        found.append(Error(text, hint="Install psycopg 3: pip install 'outrider[psycopg]'", id=f"{_E}3"))
    if find_spec("asyncpg") is None:
        text = "asyncpg is absent: relays cannot be woken from here, nor dead letters be decided about in the admin."
        hint = "Install it: pip install 'outrider[postgres]'; or set OUTRIDER[\"WAKE\"] to False."
        found.append(Warning(text, hint=hint, id=f"{_W}2"))
    return found


def _sqlite(connection: Any) -> list[CheckMessage]:
    mode = connection.settings_dict.get("OPTIONS", {}).get("transaction_mode")
    if str(mode).upper() in ("IMMEDIATE", "EXCLUSIVE"):
        return []
    text = (
        f"A transaction in DATABASES[{connection.alias!r}] fails at once, instead of waiting, if a relay writes "
        "between its first query and its first change."
    )
    hint = 'Set OPTIONS to {"transaction_mode": "IMMEDIATE"}'
    hint += "." if django.VERSION >= (5, 1) else ", which needs Django 5.1 or later."
    return [Warning(text, hint=hint, id=f"{_W}3")]


def _sentence(remedy: str) -> str:
    return f"{remedy[:1].upper()}{remedy[1:]}{'' if remedy.endswith(('.', '?')) else '.'}"
