"""The journal of the outbox in PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg

from outrider.errors import Transient, UsageError
from outrider.outbox.model import EventPlace, JournalPage, JournalSwitch
from outrider.stores.journal_rows import (
    FIRST_EVENT,
    INSTALLED,
    check_installed,
    to_histories,
    to_switch,
    whole_events,
    without_entry,
)
from outrider.stores.postgres import statements
from outrider.stores.postgres.database import PostgresDatabase

LOCK_TIMEOUT_MS = 200
"""The longest wait for the lock: writers queue behind it."""

TURN_SECONDS_MAX = 60.0
"""The time after which the switch gives up waiting for writers."""

PAUSE_SECONDS = 0.5

BATCH_MAX = 1_000

SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"


class PostgresJournal:
    """The switch and the pages of the journal."""

    def __init__(self, database: PostgresDatabase, schema: str) -> None:
        self._database, self._schema = database, schema
        self._sql = statements.load_journal(schema)

    async def switch(self) -> JournalSwitch:
        return to_switch(await self._facts(self._database))

    async def turn(self, *, on: bool) -> bool:
        """Turn the switch in a short transaction without writers, so that none has read the old switch."""
        give_up = time.monotonic() + TURN_SECONDS_MAX
        while True:
            try:
                return await self._turn(on)
            except Transient as error:
                if not isinstance(error.__cause__, asyncpg.LockNotAvailableError):
                    raise
                if time.monotonic() > give_up:
                    raise Transient(
                        "writers hold the outbox all the time, so the journal could not be switched; end long "
                        "transactions (outrider doctor shows them), and try again"
                    ) from error
            await asyncio.sleep(PAUSE_SECONDS)

    async def _turn(self, on: bool) -> bool:
        async with self._database.transaction() as conn:
            await conn.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
            await conn.execute(self._sql["lock_outbox"])
            facts = await self._facts(conn)
            check_installed(facts)
            if to_switch(facts).is_on == on:
                return False
            if on and (early := [row[0] for row in await conn.fetch(self._sql["early_relays"])]):
                raise UsageError(
                    f"relays that were started before migration 0008 would not write to the journal: "
                    f"{', '.join(early)}; restart them, and try again"
                )
            await conn.execute(self._sql["start_staged" if on else "end_staged"])
            await conn.execute(self._sql["turn"], int(on))
            return True

    async def histories(self, after: UUID | None, limit: int) -> JournalPage:
        async with self._snapshot() as conn:
            facts = await self._facts(conn)
            rows = await conn.fetch(self._sql["entries"], after or FIRST_EVENT, facts.get("journal_entry", 0), limit)
            entries = whole_events(rows, limit)
            places = await conn.fetch(self._sql["places"], list({row[0] for row in entries}))
        if rows and not entries:
            return await self.histories(after, 2 * limit)
        last = entries[-1][0] if len(rows) == limit else None
        return JournalPage(to_switch(facts), to_histories(entries, places), last)

    async def unjournaled(self, place: EventPlace, after: UUID | None, limit: int) -> JournalPage:
        async with self._snapshot() as conn:
            facts = await self._facts(conn)
            marks = facts.get("journal_position", 0), facts.get("journal_entry", 0)
            rows = await conn.fetch(self._sql[f"in_{place}"], after or FIRST_EVENT, *marks, limit)
        last = rows[-1][0] if len(rows) == limit else None
        return JournalPage(to_switch(facts), without_entry(rows, place), last)

    async def note_prune(self, days: float) -> None:
        """Note that maintenance is about to remove events of this age from the archive."""
        if INSTALLED in await self._facts(self._database):
            await self._database.fetch(self._sql["note_prune"], days)

    async def prune(self, days: float) -> int:
        """Remove old entries of events that are in no table; return their number."""
        total = 0
        after: int | None = 0 if INSTALLED in await self._facts(self._database) else None
        while after is not None:
            [(after, removed)] = await self._database.fetch(self._sql["prune"], days, after, BATCH_MAX)
            total += removed
        return total

    async def _facts(self, source: Any) -> dict[str, int]:
        return {name: value for name, value in await source.fetch(self._sql["switch"])}  # noqa: C416 - rows are records

    @asynccontextmanager
    async def _snapshot(self) -> AsyncIterator[Any]:
        async with self._database.transaction() as conn:
            await conn.execute(SNAPSHOT)
            yield conn
