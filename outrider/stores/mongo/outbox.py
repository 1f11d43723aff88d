"""The outbox in MongoDB. Each write of the relay is one transaction, fenced by its lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from uuid import UUID

from outrider.checks import CheckResult
from outrider.clock import Clock
from outrider.event import OutboxRow, Readiness, Stream, TopicRule, default_topic
from outrider.operation_log import OperationLog
from outrider.outbox.model import (
    CLAIM_SECONDS_MAX,
    Due,
    Fetched,
    HeartbeatResult,
    Lease,
    OptimisticClaim,
    Settlements,
    State,
)
from outrider.outbox.store import OutboxAdmin, OutboxJournal, OutboxMaintenance
from outrider.stores.mongo import outbox_fetch, outbox_lanes, outbox_settle, wakeup
from outrider.stores.mongo.checks import check
from outrider.stores.mongo.database import Document, MongoDatabase, Session, translated
from outrider.stores.mongo.documents import copied, to_event
from outrider.stores.mongo.journal import MongoJournal, read_switch
from outrider.stores.mongo.operation_log import MongoOperationLog
from outrider.stores.mongo.operations import run_operations_async
from outrider.stores.mongo.outbox_admin import MongoMaintenance, MongoOutboxAdmin
from outrider.stores.mongo.outbox_fetch import FILL_MAX, fill
from outrider.stores.mongo.outbox_settle import depart, value_identity
from outrider.stores.mongo.schema import check_installed_version
from outrider.stores.mongo.staging import read_setting

FILLS_MAX = 20
"""The maximum of fill transactions for documents of foreign writers before a fetch continues."""


async def renew(database: MongoDatabase, claim: OptimisticClaim, event_ids: Sequence[UUID]) -> list[OutboxRow]:
    """Extend an unexpired optimistic claim. Return the still claimed events, in the given order."""
    mine = _mine(database, claim, event_ids)
    # The majority write comes first, so the following read sees only durable claims.
    await database["outbox"].update_many(mine, [{"$set": {"claimed_until": database.after(claim.seconds)}}])
    now = await database.time()
    rows = {row["_id"]: row for row in await database["outbox"].find(mine).to_list()}
    stored = [rows[event_id] for event_id in event_ids if event_id in rows]
    return [to_event(row, now)._replace(readiness=Readiness.READY) for row in stored]


async def settle(
    session: Session,
    database: MongoDatabase,
    claim: OptimisticClaim,
    confirmed: Sequence[UUID],
    yielded: Sequence[UUID],
    *,
    archive: bool,
) -> None:
    """Write the results of a writer with a valid claim. After its end, a relay may be publishing the event."""
    outbox = database["outbox"]
    now, journaled = await read_switch(session, database)
    rows = await outbox.find(_mine(database, claim, confirmed), session=session).to_list() if confirmed else []
    order = {event_id: index for index, event_id in enumerate(confirmed)}
    removed = [copied(row) for row in sorted(rows, key=lambda row: order[row["_id"]])]
    await depart(session, database, removed, now, archive=archive, journaled=journaled)
    if yielded:
        change = {"$set": {"state": State.PENDING.value}, "$unset": {"claimed_by": "", "claimed_until": ""}}
        await outbox.update_many(_mine(database, claim, yielded), change, session=session)


class MongoStore:
    """Events in a MongoDB prepared by `outrider db migrate`. The server's time counts, except under a test clock.

    ```python
    store = await MongoStore.open("mongodb://localhost/?replicaSet=rs0")
    ```
    """

    def __init__(
        self, database: MongoDatabase, lanes: int, *, archive: bool = True, topic_rule: TopicRule = default_topic
    ) -> None:
        self.database, self.lanes, self.archive, self.topic_rule = database, lanes, archive, topic_rule
        self.admin: OutboxAdmin = MongoOutboxAdmin(self)
        self.maintenance: OutboxMaintenance = MongoMaintenance(database)
        self.operations: OperationLog = MongoOperationLog(database)
        self.journal: OutboxJournal = MongoJournal(database)
        self._backlog = wakeup.Backlog()
        self._filling = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        schema: str = "outrider",
        archive: bool = True,
        clock: Clock | None = None,
        topic_rule: TopicRule = default_topic,
    ) -> MongoStore:
        """Connect and verify that the outbox is installed."""
        database = await MongoDatabase.open(url, schema, clock=clock)
        try:
            async with database.session() as session:
                setting = await run_operations_async(read_setting(clock), session, schema)
            await database.run(check_installed_version(database))
        except BaseException:
            await database.close()
            raise
        return cls(database, setting.lanes, archive=archive, topic_rule=topic_rule)

    async def heartbeat(self, relay: str, lease_seconds: float, *, first: bool) -> HeartbeatResult | None:
        return await self.database.run(outbox_lanes.heartbeat(self.database, relay, lease_seconds, first=first))

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        return await outbox_lanes.claim(self.database, relay, lanes)

    async def release(self, lease: Lease) -> None:
        await self.database.run(outbox_lanes.release(self.database, lease))

    async def leave(self, relay: str) -> None:
        await self.database.transaction(outbox_lanes.leave, self.database, relay)

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        filled = waited = False
        while (
            fetched := await outbox_fetch.fetch(self.database, lease, quotas, self.topic_rule, filled=filled)
        ) is None:
            # Workers that fill in the same documents would lose write conflicts against each other, so they take turns.
            # The worker before may have missed the documents of this fetch: look again, and fill in the second time.
            filled = waited or not self._filling.locked()
            waited = True
            async with self._filling:
                if filled:
                    await self._fill()
        self._backlog.fetched(len(fetched.events))
        return fetched

    async def _fill(self) -> None:
        """Fill in documents of foreign writers, a limited number of times: a busy writer must not delay the fetch."""
        for _ in range(FILLS_MAX):
            if await self.database.transaction(fill, self.database, self.lanes, self.topic_rule) < FILL_MAX:
                return

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        return await self.database.run(outbox_fetch.blocked(self.database, streams))

    async def due(self, lease: Lease, events_max: int) -> Due:
        return await outbox_fetch.due(self.database, lease, events_max)

    async def last_values(self, wanted: Sequence[tuple[str, Stream]]) -> dict[tuple[str, Stream], int]:
        ids = [value_identity(rule, stream) for rule, stream in wanted]
        found = self.database["payload_last_value"].find({"_id": {"$in": ids}})
        rows = await self.database.run(found.to_list())
        return {(row["_id"]["rule"], Stream(*(row["_id"][n] for n in Stream._fields))): row["value"] for row in rows}

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        values = settlements.last_values
        if settlements.only_confirmed and not values:
            return sum([await self._confirm(lease, part) for part in outbox_settle.of_events(settlements.confirmed)])
        *parts, last = [*outbox_settle.of_settlements(settlements.outcomes())] or [[]]
        settled = sum([await self._settle(lease, replace(Settlements.of(part), last_values=values)) for part in parts])
        final = replace(Settlements.of(last, settlements.emptied), last_values=values)
        return settled + await self._settle(lease, final)

    async def _confirm(self, lease: Lease, events: Sequence[OutboxRow]) -> int:
        if outbox_settle.fit(events):
            try:
                return await self.database.transaction(
                    outbox_settle.confirm, self.database, lease, events, lanes=self.lanes, archive=self.archive
                )
            except outbox_settle.Uneven:
                pass
        return await self._settle(lease, Settlements(events))

    async def _settle(self, lease: Lease, settlements: Settlements) -> int:
        return await self.database.transaction(
            outbox_settle.settle, self.database, lease, settlements, lanes=self.lanes, archive=self.archive
        )

    async def renew_claim(self, claim: OptimisticClaim, event_ids: Sequence[UUID]) -> list[OutboxRow]:
        return await self.database.run(renew(self.database, claim, event_ids))

    async def settle_claim(self, claim: OptimisticClaim, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        await self.database.transaction(settle, self.database, claim, confirmed, yielded, archive=self.archive)

    async def notify(self) -> None:
        """Do nothing: the server notifies relays of every commit."""

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return wakeup.listening(self.database, wake, backlog=self._backlog)

    async def check(self) -> list[CheckResult]:
        with translated(self.database.where):
            return await check(self.database)

    async def close(self) -> None:
        await self.database.close()


def _mine(database: MongoDatabase, claim: OptimisticClaim, event_ids: Sequence[UUID]) -> Document:
    return {
        "_id": {"$in": list(event_ids)},
        "state": State.OPTIMISTIC.value,
        "claimed_by": claim.owner,
        "$expr": {
            "$and": [
                {"$gt": ["$claimed_until", database.now]},
                {"$lte": ["$claimed_until", database.after(CLAIM_SECONDS_MAX)]},
            ]
        },
    }
