"""The inbox in MongoDB: what a consumer needs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from uuid import UUID

from outrider.delivery import Arrival, InboxStream
from outrider.errors import OutriderError
from outrider.inbox_store import Admitted, Cause, Entry, InboxDesk, InboxPruned, Overdue, Resumed, Standing
from outrider.stores.mongo import inbox_upkeep, inbox_verbs, saga_upkeep
from outrider.stores.mongo.database import Database, Session
from outrider.stores.mongo.inbox_concluding import conclude
from outrider.stores.mongo.inbox_desk import MongoInboxDesk
from outrider.stores.mongo.inbox_documents import stream_of
from outrider.stores.mongo.inbox_upkeep import draining_query, overdue_pipeline
from outrider.stores.mongo.lending import Lending

ANSWER_SECONDS = 5.0


class MongoInbox(Lending):
    """Receipts in MongoDB, beside the data that handlers change.

    Handlers get an `AsyncClientSession` in an open transaction, to be passed on as `session=`. Open it with `await
    MongoInbox.open(url)`, or over a client of your own with `MongoInbox.over(client)`.
    """

    WHAT, VERSION = "inbox", 2

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.desk: InboxDesk = MongoInboxDesk(database, self.write)

    async def answers(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._database.run(self._database.time())
        except (OutriderError, TimeoutError):
            return False
        return True

    async def admit(self, tx: Session, consumer: str, arrivals: Sequence[Arrival], *, gated: bool) -> Admitted:
        return await self.run(tx, inbox_verbs.admit, consumer, arrivals, gated=gated)

    async def conclude(
        self, tx: Session, consumer: str, entries: Sequence[Entry], standings: Mapping[InboxStream, Standing]
    ) -> Mapping[UUID, int]:
        return await self.run(tx, conclude, consumer, entries, standings)

    async def draining(self, consumer: str, limit: int, *, cause: Cause = Cause.DRAINING) -> list[InboxStream]:
        found = self._database["inbox_stream"].find(draining_query(consumer, cause), {"_id": 1})
        rows = await self._database.run(found.sort("since").limit(limit).to_list())
        return [stream_of(row["_id"]) for row in rows]

    async def resume(
        self, tx: Session, consumer: str, stream: InboxStream, *, by_sequence: bool, limit: int, early: bool = False
    ) -> Resumed | None:
        return await self.run_unless_taken(
            tx, inbox_verbs.resume, consumer, stream, by_sequence=by_sequence, limit=limit, early=early
        )

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        pipeline = overdue_pipeline(consumer, seconds, limit, self._database.now)
        rows = await self._database.run(inbox_upkeep.aggregate(self._database["inbox_stream"], pipeline))
        return [Overdue(stream_of(row["_id"]), row.get("seen"), row["waiting"], row["since"]) for row in rows]

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove what is older; also find again what should never have been lost from sight."""
        await self.write(inbox_upkeep.release_holds, consumer)
        await self.write(inbox_upkeep.adopt_orphans, consumer)
        prune = inbox_upkeep.prune_dead_letters(self._database, consumer, dead_letter_days)
        dead_letters = await self._database.run(prune)
        receipts = await self._database.run(inbox_upkeep.prune_receipts(self._database, consumer, receipt_days))
        return InboxPruned(receipts, dead_letters)

    async def prune_barriers(self, days: float) -> int:
        """Forget what participants of sagas answered longer ago; where sagas are not installed, there is nothing."""
        return await self._database.run(saga_upkeep.prune_barriers(self._database, days))
