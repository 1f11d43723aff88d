"""Where a MongoDB is: a URL that is understood as it was meant, and named without anything secret."""

from __future__ import annotations

import re
from typing import Any

from pymongo.errors import PyMongoError
from pymongo.uri_parser import parse_uri

from outrider.errors import Misuse

SCHEMES = ("mongodb://", "mongodb+srv://")
_REMEDY = (
    "write mongodb://user:password@host:27017/?replicaSet=name; characters such as @ / # ? : in a user or password "
    "must be percent-encoded (# is %23, / is %2F, @ is %40)"
)
_HOSTS = re.compile(r"[A-Za-z0-9._\-:,\[\]%]+")

# What is the driver's default, or worse, for a service that must notice when its server is gone.
_PATIENCE = {"serverSelectionTimeoutMS": 10_000, "connectTimeoutMS": 10_000, "socketTimeoutMS": 60_000}


def check_url(url: str) -> str:
    """Return how to call the server of a URL; refuse a URL that would be read differently from how it was meant.

    >>> check_url("mongodb://user:secret@db1,db2:27018/?replicaSet=rs0")
    'MongoDB at db1,db2:27018'
    """
    scheme = next((scheme for scheme in SCHEMES if url.startswith(scheme)), None)
    if scheme is None:
        raise Misuse(f"this is no URL of MongoDB; {_REMEDY}")
    authority, *_ = re.split(r"[/?#]", url.removeprefix(scheme), maxsplit=1)
    hosts = authority.rpartition("@")[2]
    rest = url.removeprefix(scheme + authority)
    if "@" in rest or "#" in rest or not _HOSTS.fullmatch(hosts):
        raise Misuse(f"the MongoDB URL cannot be read: an @, # or / where none belongs, or no host; {_REMEDY}")
    if scheme == SCHEMES[0]:
        _check_parts(url)
    return f"MongoDB at {hosts}"


def _check_parts(url: str) -> None:
    try:
        parse_uri(url)
    except (PyMongoError, ValueError):
        # The driver's own words may repeat a part of the password.
        raise Misuse(f"the MongoDB URL cannot be read: a host, port or option makes no sense; {_REMEDY}") from None


def client_options(url: str) -> dict[str, Any]:
    """Return the options of a client of our own: what the URL says about patience stays as it is.

    >>> client_options("mongodb://db/?socketTimeoutMS=5000").get("socketTimeoutMS") is None
    True
    """
    said = url.partition("?")[2].lower()
    patience = {name: value for name, value in _PATIENCE.items() if f"{name.lower()}=" not in said}
    # A monitor that only asks needs one connection less for each server; and after an error it asks at once, while one
    # that is being told waits for up to ten seconds.
    return {
        **patience,
        "serverMonitoringMode": "poll",
        "appname": "outrider",
        "tz_aware": True,
        "uuidRepresentation": "standard",
    }
