"""MongoDB's errors in our words: what may pass, what is away, what a person must change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pymongo import errors as mongo

from outrider.errors import Misuse, OutriderError, Permanent, RaceLost, Transient, Unreachable

STANDALONE = (
    "this server is in no replica set, and transactions need one; start mongod with --replSet and run rs.initiate(), "
    "a set of one member will do"
)

TOO_OLD = "this server is older than MongoDB 5.0; upgrade it"

NOT_INSTALLED = "run: outrider db migrate"

# Numbers of the server, by name in its error_codes.yml.
_UNAUTHORIZED = {13, 18, 8000}
_NO_REPLICA_SET = {20, 263}
_MISSING = {26, 27}
_AWAY = {6, 7, 89, 91, 189, 9001, 10107, 11600, 11602, 13435, 13436}
_PASSING = {24, 46, 50, 64, 112, 125, 134, 175, 225, 239, 244, 246, 251, 262, 290, 391}


def passing(error: BaseException) -> bool:
    """Tell whether the server says that the whole transaction may succeed if it is run again."""
    return isinstance(error, mongo.PyMongoError) and error.has_error_label("TransientTransactionError")


def outrun(error: BaseException) -> bool:
    """Tell whether another transaction was first, on a server that answers."""
    return isinstance(error, mongo.OperationFailure) and passing(error) and error.code not in _AWAY


def unknown_commit(error: BaseException) -> bool:
    """Tell whether a commit may have happened or not."""
    return isinstance(error, mongo.PyMongoError) and error.has_error_label("UnknownTransactionCommitResult")


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn the driver's errors into ours.

    ```python
    with translated("MongoDB at db:27017"):
        await collection.find_one()
    ```
    """
    try:
        yield
    except (OutriderError, asyncio.CancelledError):
        raise
    except mongo.PyMongoError as error:
        raise translation(error, where) from error


def translation(error: mongo.PyMongoError, where: str) -> OutriderError:
    """Return an error of the driver in our words.

    >>> translation(mongo.AutoReconnect("gone"), "MongoDB at db:27017")
    Unreachable('MongoDB at db:27017 does not answer (AutoReconnect: gone); is it running, and has it a primary?')
    """
    code = error.code if isinstance(error, mongo.OperationFailure) else None
    if isinstance(error, mongo.ConnectionFailure) or code in _AWAY:
        # The driver says so of servers that answer, and are in another set, or in none.
        named = "No replica set members" in str(error)
        doubt = "is replicaSet in the URL the name of its replica set" if named else "has it a primary"
        return Unreachable(f"{where} does not answer ({_told(error)}); is it running, and {doubt}?")
    if outrun(error):
        return RaceLost(f"{where}: another transaction was first ({_told(error)}); try again")
    if code in _PASSING or passing(error) or unknown_commit(error) or error.timeout:
        return Transient(f"{where}: {_told(error)}; try again")
    if remedy := _remedy(error, code):
        return Misuse(f"{where}: {remedy} ({_told(error)})")
    return Permanent(f"{where}: {_told(error)}")


def _remedy(error: mongo.PyMongoError, code: int | None) -> str | None:
    """Say what a person must change, if that is what it takes."""
    if code in _UNAUTHORIZED:
        return "it refused us; check user, password and authSource, and the roles of the user"
    if code in _NO_REPLICA_SET and "replica set" in str(error):
        return STANDALONE
    if code in _MISSING:
        return f"the outbox is not installed; {NOT_INSTALLED}"
    if isinstance(error, mongo.ConfigurationError):
        return "it cannot be reached like this; check the options of the URL"
    return None


def _told(error: BaseException) -> str:
    # The driver appends the topology or the whole reply; the first line says what happened.
    said = str(error).split(", Timeout: ", 1)[0].split(", full error: ", 1)[0]
    if isinstance(error, mongo.BulkWriteError) and (found := error.details.get("writeErrors")):
        said = found[0]["errmsg"]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
