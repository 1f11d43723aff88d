"""Whether there is a pooler between us and PostgreSQL that hands sessions around, and whether wake-ups get through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import asyncpg

from outrider.finding import Finding, ok, refuse, warn
from outrider.stores.postgres.database import translated

ROUNDS = 4
WAIT_SECONDS = 2.0
"""How long a notification, or an answer while another connection is in a transaction, is waited for."""


async def examine_pooler(url: str, where: str, *, pooled: bool) -> list[Finding]:
    """Compare what the settings say about a pooler with what there is."""
    with translated(where):
        async with _connected(url) as first, _connected(url) as second:
            shared = await _share_sessions(first, second)
            heard = await _hears(first, second)
    return [judge_sessions(shared=shared, pooled=pooled), judge_wakeups(heard=heard, pooled=pooled)]


def judge_sessions(*, shared: bool, pooled: bool) -> Finding:
    """Say whether the store was told the truth.

    >>> judge_sessions(shared=True, pooled=False).level
    <Level.REFUSE: 'refuse'>
    """
    check = "postgres-pooler"
    if shared and not pooled:
        return refuse(
            check,
            "a pooler gives each transaction another session, and the store was not told so: statements will fail",
            "add pooled=true to the store's URL (in a file: pooled: true beside its url), or connect directly",
        )
    if pooled and not shared:
        return warn(
            check,
            "the store was told that a pooler shares sessions, and none does: wake-ups are given up for nothing",
            "take pooled=true out of the store's URL",
        )
    return ok(check, "behind a pooler, and told so" if shared else "sessions are our own")


def judge_wakeups(*, heard: bool, pooled: bool) -> Finding:
    """Say whether a hint after a commit wakes a relay.

    >>> judge_wakeups(heard=False, pooled=True).level
    <Level.WARN: 'warn'>
    """
    check = "postgres-wakeups"
    if heard and not pooled:
        return ok(check, "a notification arrives")
    return warn(
        check,
        "notifications do not arrive through a pooler, so an idle relay only sees new events after poll_seconds_max",
        "connect the relay to PostgreSQL directly, or lower poll_seconds_max",
    )


async def _share_sessions(first: Any, second: Any) -> bool:
    """Tell whether two connections meet in one server process, or one connection wanders between several."""
    mine = await _process(first)
    async with second.transaction():
        if await second.fetchval("SELECT pg_backend_pid()") == mine:
            return True
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                others = {await _process(first) for _ in range(ROUNDS)}
        except TimeoutError:
            # Only a pooler makes one connection wait for another that does nothing.
            return True
    return others | {await _process(first)} != {mine}


async def _process(conn: Any) -> int:
    # In a transaction, because through a pooler a statement is only safe in one.
    async with conn.transaction():
        number: int = await conn.fetchval("SELECT pg_backend_pid()")
        return number


async def _hears(listener: Any, sender: Any) -> bool:
    """Notify one connection from the other, on a channel that nobody else knows."""
    channel, heard = f"outrider_doctor_{uuid4().hex}", asyncio.Event()
    await listener.add_listener(channel, lambda *_: heard.set())
    try:
        async with sender.transaction():
            await sender.execute("SELECT pg_notify($1, '')", channel)
        async with asyncio.timeout(WAIT_SECONDS):
            await heard.wait()
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
        # Without a goodbye: a connection that listens would complain about its listener.
        conn.terminate()
