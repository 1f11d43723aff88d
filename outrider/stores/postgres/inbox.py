"""The inbox in PostgreSQL: what a consumer needs.

Receipts come first, then streams, each in sorted order, so that consumers wait for each other and never in a circle.
A statement that reads where a stream stands begins after the receipts are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from uuid import UUID

from outrider.delivery import Arrival, InboxStream
from outrider.errors import OutriderError, UnfitHandler
from outrider.inbox_store import Admitted, Cause, Entry, InboxDesk, InboxPruned, Overdue, Resumed, Standing, Waiting
from outrider.stores.inbox_rows import delivery_of, may_go, place_of, standing_of
from outrider.stores.lending import ENDED
from outrider.stores.postgres import queries
from outrider.stores.postgres.database import Database
from outrider.stores.postgres.inbox_concluding import conclude
from outrider.stores.postgres.inbox_desk import PostgresInboxDesk
from outrider.stores.postgres.lending import Lending

ANSWER_SECONDS = 5.0
ADOPT_MAX = 100

Received = tuple[set[UUID], dict[InboxStream, Standing]]
"""The events that had no receipt, and where streams stand that were locked on the way."""


class PostgresInbox(Lending):
    """Receipts in PostgreSQL, beside the data that handlers change.

    Open it with `await PostgresInbox.open(url)`, or over a pool of your own with `PostgresInbox.over(pool)`.
    """

    WHAT, LAST_STEP, LOCKED = "inbox", "inbox_dead_letter_age", "receipt or stream"

    def __init__(self, database: Database, *, schema: str = "outrider") -> None:
        super().__init__(database, schema=schema)
        # Commands to participants are handled here, so what they have answered is pruned here too.
        shared = {name: queries.load_saga(schema)[name] for name in ("may_prune_barriers", "prune_barriers")}
        self.sql = queries.load_inbox(schema) | shared
        self.desk: InboxDesk = PostgresInboxDesk(database, schema)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        number: int | None = None
        try:
            async with super().transaction() as tx:
                try:
                    yield tx
                except Exception:
                    number = self._lent.get(id(tx))
                    raise
                finally:
                    self._lent.pop(id(tx), None)
        except Exception as error:
            # Asked when it is rolled back, so that nobody needs two connections at a time.
            if isinstance(error, UnfitHandler) or not await self._has_committed(number):
                raise
            raise UnfitHandler(ENDED) from error

    async def answers(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._database.fetch("SELECT 1")
        except (OutriderError, TimeoutError):
            return False
        return True

    async def admit(self, tx: Any, consumer: str, arrivals: Sequence[Arrival], *, gated: bool) -> Admitted:
        alone = len(arrivals) == 1
        fresh, standings = await (self._receive_one if alone else self._receive)(tx, consumer, arrivals)
        news = [arrival for arrival in arrivals if arrival.event_id in fresh]
        numbered = {arrival.stream for arrival in news if gated and arrival.sequence is not None}
        # Where only one has come, its stream is locked already, if it has a row.
        unlocked = numbered - standings.keys() if alone else {arrival.stream for arrival in news}
        standings |= await self._lock(tx, consumer, unlocked, numbered)
        suspects = [a.event_id for a in news if a.stream in standings and standings[a.stream].waiting]
        return Admitted(frozenset(fresh - await self._waiting_already(tx, consumer, suspects)), standings)

    async def conclude(
        self, tx: Any, consumer: str, entries: Sequence[Entry], standings: Mapping[InboxStream, Standing]
    ) -> Mapping[UUID, int]:
        return await conclude(partial(self.run, tx), consumer, entries, standings)

    async def draining(self, consumer: str, limit: int, *, cause: Cause = Cause.DRAINING) -> list[InboxStream]:
        rows = await self._database.fetch(self.sql["draining"], consumer, cause, limit)
        return [InboxStream(*row) for row in rows]

    async def resume(
        self, tx: Any, consumer: str, stream: InboxStream, *, by_sequence: bool, limit: int, early: bool = False
    ) -> Resumed | None:
        place = place_of(stream)
        locked = await self.run(tx, "lock_unless_taken", consumer, *place)
        standing = standing_of(*locked[0][:3]) if locked else Standing()
        self._note(tx, locked)
        if not may_go(standing.cause, early=early):
            return None
        verb = "resume_by_sequence" if by_sequence or standing.cause is Cause.EARLY else "resume_in_turn"
        rows = await self.run(tx, verb, consumer, *place, limit)
        if not rows:
            await self.run(tx, "forget" if standing.seen is None else "mend", consumer, *place)
            standing = Standing(standing.seen)
        waiting = [Waiting(row["id"], row["event_id"], delivery_of(row[4:]), row["replayed"]) for row in rows]
        return Resumed(standing, waiting, frozenset(row["event_id"] for row in rows if row["fresh"]))

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        rows = await self._database.fetch(self.sql["overdue"], consumer, seconds, limit)
        return [Overdue(InboxStream(*row[:3]), row["seen"], row["waiting"], row["since"]) for row in rows]

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove what is older; also find again what should never have been lost from sight."""
        await self._database.execute(self.sql["release_holds"], consumer)
        await self._database.execute(self.sql["adopt_orphans"], consumer, ADOPT_MAX)
        dead_letters = await self._in_batches("prune_dead_letters", consumer, dead_letter_days)
        return InboxPruned(await self._in_batches("prune_receipts", consumer, receipt_days), dead_letters)

    async def prune_barriers(self, days: float) -> int:
        [[may]] = await self._database.fetch(self.sql["may_prune_barriers"])
        return await self._in_batches("prune_barriers", days) if may else 0

    async def _receive_one(self, tx: Any, consumer: str, arrivals: Sequence[Arrival]) -> Received:
        [arrival] = arrivals
        topic, key, band = place_of(arrival.stream)
        receipt = (arrival.event_id, arrival.event_type, topic, key, arrival.sequence)
        rows = await self.run(tx, "admit_one", consumer, *receipt, band)
        if not rows:
            return set(), {}
        self._note(tx, rows)
        known = rows[0]["waiting"] is not None
        return {arrival.event_id}, {arrival.stream: standing_of(*rows[0][:3])} if known else {}

    async def _receive(self, tx: Any, consumer: str, arrivals: Sequence[Arrival]) -> Received:
        first = {arrival.event_id: arrival for arrival in reversed(arrivals)}
        receipts = [
            (event_id, arrival.event_type, *place_of(arrival.stream)[:2], arrival.sequence)
            for event_id, arrival in sorted(first.items())
        ]
        columns = [list(column) for column in zip(*receipts, strict=True)]
        rows = await self.run(tx, "receive", consumer, *columns)
        self._note(tx, rows)
        return {row["event_id"] for row in rows}, {}

    def _note(self, tx: Any, rows: Sequence[Any]) -> None:
        """Note which transaction this is, as a statement tells."""
        for row in rows[:1]:
            self._lent[id(tx)] = row["transaction"]

    async def _lock(
        self, tx: Any, consumer: str, streams: set[InboxStream], numbered: set[InboxStream]
    ) -> dict[InboxStream, Standing]:
        """Lock the rows of streams, sorted; those that are numbered get one. Return where they stand."""
        standings: dict[InboxStream, Standing] = {}
        while streams:
            if made := sorted(streams & numbered):
                await self.run(tx, "make_streams", consumer, *_columns(made))
            wanted = sorted(streams)
            for ord_, *standing in await self.run(tx, "lock_streams", consumer, *_columns(wanted)):
                standings[wanted[ord_ - 1]] = standing_of(*standing)
            # A person may have let go of a stream between the two statements.
            streams = (streams & numbered) - standings.keys()
        return standings

    async def _waiting_already(self, tx: Any, consumer: str, event_ids: list[UUID]) -> set[UUID]:
        """Take back the receipts of events that wait; asked only where the row of a stream says that some do."""
        if not event_ids:
            return set()
        return {row["event_id"] for row in await self.run(tx, "withdraw_waiting", consumer, event_ids)}


def _columns(streams: Sequence[InboxStream]) -> list[list[Any]]:
    return [list(column) for column in zip(*map(place_of, streams), strict=True)]
