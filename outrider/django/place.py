"""Where a database of the project is, as the URL that Outrider's own connections take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.db import connections

from outrider.errors import Misuse

PASSED_ON = (
    *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation"),
    *("target_session_attrs", "service", "passfile"),
)
"""Those of libpq's options that asyncpg understands too; the others concern Django's own connection."""


def store_url(alias: str) -> str:
    """Return the URL of a database by its alias; in a test, that of the test database.

    ```python
    store_url("default")  # postgresql://shop:s3cret@db/shop?sslmode=require
    ```
    """
    connection = connections[alias]
    facts = connection.settings_dict
    if connection.vendor == "postgresql":
        return _postgres(facts)
    if connection.vendor == "sqlite":
        return _sqlite(alias, facts["NAME"])
    raise Misuse(f"DATABASES[{alias!r}] is {connection.vendor}; outrider works in PostgreSQL and SQLite")


def _postgres(facts: Mapping[str, Any]) -> str:
    options = facts.get("OPTIONS", {})
    place, query = _host(str(facts.get("HOST") or ""), str(facts.get("PORT") or ""))
    query |= {name: str(options[name]) for name in PASSED_ON if options.get(name)}
    if facts.get("DISABLE_SERVER_SIDE_CURSORS"):
        # Django's way to say that a pooler in between shares sessions.
        query["pooled"] = "true"
    tail = f"?{urlencode(query, quote_via=quote)}" if query else ""
    return f"postgresql://{_user(facts)}{place}/{quote(str(facts.get('NAME') or ''), safe='')}{tail}"


def _host(host: str, port: str) -> tuple[str, dict[str, str]]:
    """Return host and port as they stand before the path; or, where they cannot, as options after it."""
    if host and not set(host) & set("/,:"):
        return (f"{host}:{port}" if port else host), {}
    # None, a directory of sockets, several hosts, or an address of version 6, which goes into brackets.
    named = [f"[{each}]" if ":" in each and not each.startswith(("/", "[")) else each for each in host.split(",")]
    given = {"host": ",".join(named), "port": port}
    return "", {name: value for name, value in given.items() if value}


def _user(facts: Mapping[str, Any]) -> str:
    user, password = (quote(str(facts.get(name) or ""), safe="") for name in ("USER", "PASSWORD"))
    if not user and not password:
        return ""
    return f"{user}:{password}@" if password else f"{user}@"


def _sqlite(alias: str, name: str | Path) -> str:
    text = str(name)
    if text == ":memory:" or text.startswith("file:"):
        raise Misuse(
            f"the database {alias!r} is in memory or named by a URI, so nobody else can open it; name a file in "
            f"DATABASES[{alias!r}]['NAME'], and for tests in ['TEST']['NAME']"
        )
    return f"sqlite:///{text}"
