"""Checks of a PostgreSQL server: durability of commits, rights of the relay, obstacles such as long transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

import asyncpg

from outrider.checks import CheckResult, Level, fail, is_loopback, ok, warn
from outrider.stores.postgres.database import translated

if TYPE_CHECKING:
    from outrider.stores.postgres.outbox import PostgresStore


VERSION_MIN = 14

LONG_SECONDS = 300.0
"""A transaction that is open for longer keeps rows from being vacuumed."""

DAYS_AHEAD_MIN = 2

CHECKS = {
    "postgres-version": "the server is new enough",
    "postgres-writable": "the role may write, and the server is no replica",
    "postgres-fsync": "the server waits for its disk",
    "postgres-full-page-writes": "a page torn by a crash is repaired",
    "postgres-synchronous-commit": "writers wait until their commit is on disk",
    "postgres-encryption": "the connection is encrypted",
    "postgres-autovacuum": "the outbox is vacuumed",
    "postgres-rights": "the role may do what a relay does",
    "postgres-partitions": "the archive has its days ahead, and somebody who may make more",
    "postgres-transactions": "no transaction has been open for long",
    "postgres-pooler": "the store knows whether a pooler shares its sessions",
    "postgres-sequence": "an idle relay notices inserts",
    "postgres-wakeups": "a notification reaches a relay, or the relay notices inserts without one",
}

SWITCHES = (
    (
        "read_only",
        "off",
        ok("postgres-writable", "the role may write"),
        fail(
            "postgres-writable",
            "transactions are read-only here",
            "point the store at the primary, and take default_transaction_read_only off role and database",
        ),
    ),
    (
        "fsync",
        "on",
        ok("postgres-fsync", "on"),
        fail(
            "postgres-fsync",
            "fsync is off: a crash of the machine can lose or corrupt everything that was committed",
            "set fsync = on",
        ),
    ),
    (
        "full_page_writes",
        "on",
        ok("postgres-full-page-writes", "on"),
        warn(
            "postgres-full-page-writes",
            "full_page_writes is off: a crash can leave torn pages, unless the filesystem never tears them",
            "set full_page_writes = on",
        ),
    ),
)
"""A setting, its recommended value, and the texts for a match and a mismatch."""

ROUNDS = 4

WAIT_SECONDS = 2.0
"""The time limit for a notification, or for an answer while another connection is in a transaction."""


async def check(store: PostgresStore) -> list[CheckResult]:
    """Query the server and return the check results."""
    database, sql = store.database, store.sql
    [facts] = await database.fetch(sql["server_facts"])
    hasty = [row["role"] for row in await database.fetch(sql["hasty_roles"])]
    missing = await database.fetch(sql["missing_rights"])
    [[may]] = await database.fetch(sql["may_make_partitions"])
    sequence = check_sequence(await database.fetch(sql["sequence_facts"]), f"{store.schema}.outbox_id_seq")
    [long] = await database.fetch(sql["long_transactions"], LONG_SECONDS)
    return [
        *check_server(facts),
        check_commits(facts["synchronous_commit"], hasty),
        check_encryption(database.url, encrypted=facts["encrypted"]),
        check_vacuum(facts),
        check_rights([f"{row['what']} on {row['name']}" for row in missing]),
        await _partitions(store, may=may),
        check_transactions(long),
        sequence,
        *await check_pooler(database.url, database.where, pooled=database.pooled, watched=sequence.level is Level.OK),
    ]


def check_server(facts: Mapping[str, Any]) -> list[CheckResult]:
    """Check the settings of the whole server."""
    switches = [good if facts[name] == wanted else bad for name, wanted, good, bad in SWITCHES]
    return [check_version(facts["version_number"], facts["version"]), *switches]


def check_version(number: int, version: str) -> CheckResult:
    """Check the version of the server.

    >>> check_version(130_004, "13.4").level
    <Level.ERROR: 'error'>
    """
    if number >= VERSION_MIN * 10_000:
        return ok("postgres-version", f"PostgreSQL {version}")
    return fail("postgres-version", f"PostgreSQL {version}", f"upgrade the server to {VERSION_MIN} or later")


def check_commits(own: str, hasty: Sequence[str]) -> CheckResult:
    """Check whether a commit is durable when it returns, for the relay and for other roles with own settings.

    >>> check_commits("on", ["shop"]).text
    'synchronous_commit is off for shop: a crash may lose a commit whose event is out already'
    """
    check = "postgres-synchronous-commit"
    whose = list(hasty) or (["this role"] if own == "off" else [])
    if not whose:
        return ok(check, own)
    text = f"synchronous_commit is off for {', '.join(whose)}: a crash may lose a commit whose event is out already"
    return warn(check, text, "leave synchronous_commit on for every role that stages events")


def check_encryption(url: str, *, encrypted: bool) -> CheckResult:
    """Check whether the connection is encrypted.

    >>> check_encryption("postgresql://db.example/shop", encrypted=False).level
    <Level.WARN: 'warn'>
    """
    parts = urlsplit(url)
    named = parse_qs(parts.query).get("host", [unquote(parts.netloc.rpartition("@")[2])])
    if encrypted:
        return ok("postgres-encryption", "TLS")
    if all(is_loopback(host) for host in named[-1].split(",")):
        return ok("postgres-encryption", "not encrypted, and on this machine only")
    return warn(
        "postgres-encryption",
        "events cross the network unencrypted",
        "add sslmode=verify-full to the store's URL, and switch TLS on at the server",
    )


def check_vacuum(facts: Mapping[str, Any]) -> CheckResult:
    """Check whether the server vacuums delivered rows."""
    if facts["autovacuum"] == "on" and not facts["unvacuumed"]:
        return ok("postgres-autovacuum", "on")
    where = "the outbox" if facts["autovacuum"] == "on" else "the server"
    return warn(
        "postgres-autovacuum",
        f"autovacuum is off for {where}: every delivered event stays in the table as a dead row, and fetches slow down",
        "set autovacuum = on" if where == "the server" else "ALTER TABLE outbox RESET (autovacuum_enabled)",
    )


def check_rights(missing: Sequence[str]) -> CheckResult:
    """Check the rights of the role.

    >>> check_rights(["DELETE on outbox"]).text
    'the role may not: DELETE on outbox'
    """
    if not missing:
        return ok("postgres-rights", "all that a relay needs")
    text = f"the role may not: {', '.join(missing)}"
    return fail("postgres-rights", text, "grant it SELECT, INSERT, UPDATE and DELETE on the tables of the schema")


def check_transactions(long: Mapping[str, Any]) -> CheckResult:
    """Check for transactions that keep dead rows from being vacuumed."""
    count = long["transactions"]
    if not count:
        return ok("postgres-transactions", f"none that we may see is older than {LONG_SECONDS:g} s")
    return warn(
        "postgres-transactions",
        f"{count} open for longer than {LONG_SECONDS:g} s, the oldest for {long['seconds']:.0f} s (process "
        f"{long['pid']}): vacuum cannot clear away what was delivered since, and fetches slow down",
        f"end it: SELECT pg_terminate_backend({long['pid']}); and set idle_in_transaction_session_timeout",
    )


async def _partitions(store: PostgresStore, *, may: bool) -> CheckResult:
    [[today]] = await store.database.fetch(store.sql["today"])
    names = {row["relname"] for row in await store.database.fetch(store.sql["partitions"])}
    [[netted]] = await store.database.fetch(store.sql["anything_netted"])
    return check_partitions(today, names, netted=netted, may=may, archive=store.archive)


def check_partitions(today: date, names: set[str], *, netted: bool, may: bool, archive: bool) -> CheckResult:
    """Check whether the archive has partitions for the coming days."""
    check = "postgres-partitions"
    if not archive:
        return ok(check, "delivered events are not archived")
    if not may:
        return warn(
            check,
            "the role does not own the archive, so a relay cannot add its daily partitions: everything goes to the "
            "default partition, which is pruned row by row",
            "run the relay as the owner of the schema, or make its role a member of the owner's",
        )
    wanted = [f"outbox_archive_{today + timedelta(days=ahead):%Y%m%d}" for ahead in range(DAYS_AHEAD_MIN + 1)]
    if missing := [name for name in wanted if name not in names]:
        text = f"not there yet: {', '.join(missing)}; no relay has done its maintenance lately"
        return warn(check, text, "start a relay, or run: outrider db migrate")
    if netted:
        text = "the default partition holds rows that found no day; it is pruned row by row"
        return warn(check, text, "nothing, if it shrinks with time; else keep a relay running")
    return ok(check, "there, days ahead")


def check_sequence(facts: Sequence[Mapping[str, Any]], name: str) -> CheckResult:
    """Check whether the relay can look at the id sequence, and whether every insert moves the sequence.

    >>> check_sequence([{"readable": False, "cache": 1}], "outrider.outbox_id_seq").level
    <Level.WARN: 'warn'>
    """
    check, found = "postgres-sequence", facts[0] if facts else {"readable": False, "cache": 1}
    if not found["readable"]:
        text = f"the role may not read the sequence {name}, so an idle relay only sees new events when it polls"
        return warn(check, text, f"GRANT SELECT ON SEQUENCE {name} TO the role of the relay")
    if found["cache"] > 1:
        text = f"a session takes {found['cache']} numbers of {name} at once, and an idle relay only notices the first"
        return warn(check, text, f"ALTER SEQUENCE {name} CACHE 1")
    return ok(check, "the role may read it, and every insert moves it")


async def check_pooler(url: str, where: str, *, pooled: bool, watched: bool) -> list[CheckResult]:
    """Compare the setting `pooled` with the actual behaviour of the connection."""
    with translated(where):
        async with _connected(url) as first, _connected(url) as second:
            shared = await _share_sessions(first, second)
            notified = await _is_notified(first, second)
    return [
        check_sessions(shared=shared, pooled=pooled),
        check_notifications(notified=notified, pooled=pooled, watched=watched),
    ]


def check_sessions(*, shared: bool, pooled: bool) -> CheckResult:
    """Check whether the setting `pooled` is correct.

    >>> check_sessions(shared=True, pooled=False).level
    <Level.ERROR: 'error'>
    """
    check = "postgres-pooler"
    if shared and not pooled:
        return fail(
            check,
            "a pooler gives each transaction another session, and pooled=true is not set: statements will fail",
            "add pooled=true to the store's URL (in a file: pooled: true beside its url), or connect directly",
        )
    if pooled and not shared:
        return warn(
            check,
            "pooled=true is set, and no pooler shares sessions: notifications are disabled without need",
            "take pooled=true out of the store's URL",
        )
    return ok(check, "behind a pooler, and pooled=true is set" if shared else "sessions are our own")


def check_notifications(*, notified: bool, pooled: bool, watched: bool) -> CheckResult:
    """Check whether a notification after a commit wakes a relay, or the relay notices inserts without one.

    >>> check_notifications(notified=False, pooled=True, watched=False).level
    <Level.WARN: 'warn'>
    """
    check = "postgres-wakeups"
    if notified and not pooled:
        return ok(check, "a notification arrives")
    if watched:
        return ok(check, "notifications do not arrive through a pooler; relays look at the id sequence instead")
    return warn(
        check,
        "notifications do not arrive through a pooler, so an idle relay only sees new events after poll_seconds_max",
        "let the relay read the id sequence (see postgres-sequence), or connect it to PostgreSQL directly",
    )


async def _share_sessions(first: Any, second: Any) -> bool:
    """Return whether two connections share a server process, or one connection changes its server process."""
    mine = await _process(first)
    async with second.transaction():
        if await second.fetchval("SELECT pg_backend_pid()") == mine:
            return True
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                others = {await _process(first) for _ in range(ROUNDS)}
        except TimeoutError:
            # Only a pooler makes one connection wait for another idle connection.
            return True
    return others | {await _process(first)} != {mine}


async def _process(conn: Any) -> int:
    # A transaction, because a statement through a pooler is only safe inside one.
    async with conn.transaction():
        number: int = await conn.fetchval("SELECT pg_backend_pid()")
        return number


async def _is_notified(listener: Any, sender: Any) -> bool:
    """Notify one connection from the other, on a random channel."""
    channel, notified = f"outrider_doctor_{uuid4().hex}", asyncio.Event()
    await listener.add_listener(channel, lambda *_: notified.set())
    try:
        async with sender.transaction():
            await sender.execute("SELECT pg_notify($1, '')", channel)
        async with asyncio.timeout(WAIT_SECONDS):
            await notified.wait()
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    settings = {"application_name": "outrider doctor"}
    conn = await asyncpg.connect(url, timeout=10, command_timeout=10, statement_cache_size=0, server_settings=settings)
    try:
        yield conn
    finally:
        # Terminate instead of close: the driver would log a warning about the open listener.
        conn.terminate()
