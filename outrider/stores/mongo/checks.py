"""Checks of a MongoDB server: durability of confirmed writes, rights of the relay, change streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymongo.errors import OperationFailure

from outrider.checks import CheckResult, fail, ok, warn
from outrider.stores.mongo.database import MongoDatabase

VERSION_MIN = (5, 0)
MEMBERS_MIN = 3

CHECKS = {
    "mongo-version": "the server is new enough",
    "mongo-replica-set": "events outlive the loss of a server",
    "mongo-journal": "a majority has a commit on disk before it is confirmed",
    "mongo-write-concern": "writers wait until a majority has their commit",
    "mongo-rights": "the user may do what a relay does",
    "mongo-wakeups": "a change stream reaches a relay",
}

UNSEEN = "give the user the role clusterMonitor, to let this be examined"


async def check(database: MongoDatabase) -> list[CheckResult]:
    """Query the server and return the check results. The function writes nothing."""
    admin = database.client.admin
    build, hello = await admin.command("buildInfo"), await admin.command("hello")
    return [
        check_version(build["version"]),
        check_members(hello),
        check_journal(await _asked(database, {"replSetGetConfig": 1})),
        check_write_concern(await _asked(database, {"getDefaultRWConcern": 1})),
        check_rights(database.schema, await _asked(database, {"connectionStatus": 1, "showPrivileges": True})),
        await _wakeups(database),
    ]


async def _asked(database: MongoDatabase, command: dict[str, Any]) -> dict[str, Any] | None:
    """Return the reply of the server, or None if the user lacks the right to run the command."""
    try:
        reply: dict[str, Any] = await database.client.admin.command(command)
    except OperationFailure:
        return None
    return reply


async def _wakeups(database: MongoDatabase) -> CheckResult:
    try:
        async with await database["outbox"].watch([{"$match": {"operationType": "insert"}}]):
            return ok("mongo-wakeups", "a change stream can be opened")
    except OperationFailure as error:
        text = f"no change stream can be opened, so relays find events by polling only ({error.details})"
        return warn("mongo-wakeups", text, "grant the user changeStream and find on the collection outbox")


def check_version(version: str) -> CheckResult:
    """Check the version of the server.

    >>> check_version("4.4.29").remedy
    'upgrade MongoDB to 5.0 or later'
    """
    if tuple(int(part) for part in version.split(".")[:2]) >= VERSION_MIN:
        return ok("mongo-version", f"MongoDB {version}")
    return fail("mongo-version", f"MongoDB {version} is too old", "upgrade MongoDB to 5.0 or later")


def check_members(hello: Mapping[str, Any]) -> CheckResult:
    """Check how many servers hold the events.

    >>> check_members({"hosts": ["a:27017"], "setName": "rs0"}).level
    <Level.WARN: 'warn'>
    """
    hosts = len(hello.get("hosts", ()))
    if hello.get("msg") == "isdbgrid":
        return ok("mongo-replica-set", "behind mongos")
    if hosts >= MEMBERS_MIN:
        return ok("mongo-replica-set", f"{hello['setName']} has {hosts} members with data")
    text = f"{hello.get('setName')} has {hosts} with data: if one is lost, commits wait or events are lost"
    return warn("mongo-replica-set", text, "run three members with data in production")


def check_journal(config: Mapping[str, Any] | None) -> CheckResult:
    """Check whether a majority write is also a write to the journals of a majority.

    >>> check_journal({"config": {"writeConcernMajorityJournalDefault": False}}).level
    <Level.ERROR: 'error'>
    """
    if config is None:
        return warn("mongo-journal", "the user may not see the set's configuration", UNSEEN)
    if config["config"].get("writeConcernMajorityJournalDefault", True):
        return ok("mongo-journal", "a majority has it on disk")
    text = "writeConcernMajorityJournalDefault is false: a power cut can take back what a majority has confirmed"
    return fail("mongo-journal", text, "set it to true with rs.reconfig()")


def check_write_concern(defaults: Mapping[str, Any] | None) -> CheckResult:
    """Check the write concern that applies to a writer without a write concern of its own.

    >>> check_write_concern({"defaultWriteConcern": {"w": 1}}).check
    'mongo-write-concern'
    """
    if defaults is None:
        return warn("mongo-write-concern", "the user may not see the default write concern", UNSEEN)
    # A replica set with an arbiter waits for one server only, and its reply has no default write concern.
    w = defaults.get("defaultWriteConcern", {}).get("w", 1)
    if w == "majority":
        return ok("mongo-write-concern", "majority by default")
    text = f"the default write concern is w={w}: a failover can take back a business transaction with its event"
    return warn("mongo-write-concern", text, "set the default to majority, or let writers say so in their transactions")


NEEDED = {"find", "insert", "update", "remove"}


def check_rights(schema: str, status: Mapping[str, Any] | None) -> CheckResult:
    """Check whether the user may read and write the collections. A server without access control allows everything.

    >>> check_rights("outrider", {"authInfo": {"authenticatedUsers": [], "authenticatedUserPrivileges": []}}).text
    'the server requires no login'
    """
    auth = (status or {}).get("authInfo", {})
    if not auth.get("authenticatedUsers"):
        return ok("mongo-rights", "the server requires no login")
    may: set[str] = set()
    for privilege in auth["authenticatedUserPrivileges"]:
        resource = privilege["resource"]
        if resource.get("anyResource") or (resource.get("db") in (schema, "") and resource.get("collection") == ""):
            may |= set(privilege["actions"])
    if may >= NEEDED:
        return ok("mongo-rights", "the user may read and write every collection of the outbox")
    text = f"the user may not {', '.join(sorted(NEEDED - may))} in every collection of {schema}"
    return warn("mongo-rights", text, f"grant the user readWrite on the database {schema}")
