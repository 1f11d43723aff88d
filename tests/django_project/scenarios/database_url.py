"""Where the database is, and what the checks say of it."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from django.core.checks import run_checks
from django.db import connections

from outrider.django.conf import store_url
from outrider.errors import UsageError


def reads_back() -> None:
    """A URL leads to the role, password and database that it was made of."""
    parts = urlsplit(store_url("default"))
    read = [unquote(parts.username or ""), unquote(parts.password or ""), unquote(parts.path[1:])]
    assert read == json.loads(os.environ["SHOP_EXPECTED"])


def forms() -> None:
    """Sockets, several hosts, addresses, certificates and poolers each have their form."""
    connection = connections["default"]
    connection.vendor = "postgresql"
    usual: dict[str, Any] = {"NAME": "shop", "USER": "me", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": {}}
    for facts, url in (
        ({}, "postgresql://me@/shop"),
        ({"USER": ""}, "postgresql:///shop"),
        ({"HOST": "db", "PORT": 5433}, "postgresql://me@db:5433/shop"),
        ({"HOST": "/run/pg", "PORT": "5433"}, "postgresql://me@/shop?host=%2Frun%2Fpg&port=5433"),
        ({"HOST": "a,b"}, "postgresql://me@/shop?host=a%2Cb"),
        ({"HOST": "::1"}, "postgresql://me@/shop?host=%5B%3A%3A1%5D"),
        ({"HOST": "db", "DISABLE_SERVER_SIDE_CURSORS": True}, "postgresql://me@db/shop?pooled=true"),
        (
            {"HOST": "db", "OPTIONS": {"sslmode": "verify-full", "sslrootcert": "/a b.pem", "pool": True}},
            "postgresql://me@db/shop?sslmode=verify-full&sslrootcert=%2Fa%20b.pem",
        ),
    ):
        connection.settings_dict = {**usual, **facts}
        assert store_url("default") == url, (store_url("default"), url)
    connection.vendor = "sqlite"
    connection.settings_dict = {**usual, "NAME": ":memory:"}
    with pytest.raises(UsageError, match="other processes cannot open it"):
        store_url("default")


def checked() -> None:
    """Print which checks have something to say."""
    print([message.id for message in run_checks() if str(message.id).startswith("outrider")])
