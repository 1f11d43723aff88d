"""Sagas in MongoDB: what a worker needs.

Whoever saves writes the instance, so two that save one saga meet there, and so do a save and a claim. Whoever posts
only adds mail, and stands in nobody's way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from outrider.saga_store import Claim, NewMail, NewSaga, Record, SagaDesk, SagaPruned, Turn, Undelivered
from outrider.stores.mongo import saga_claiming, saga_reading, saga_turns, saga_upkeep, saga_writing
from outrider.stores.mongo.calling import told
from outrider.stores.mongo.database import Database, Session
from outrider.stores.mongo.lending import Lending, Lent
from outrider.stores.mongo.saga_desk import MongoSagaDesk
from outrider.stores.mongo.saga_sparing import sparing
from outrider.stores.mongo.steps import Steps, arun
from outrider.stores.mongo.wakeup import listening

T = TypeVar("T")


class MongoSagas(Lending):
    """Sagas in MongoDB, beside the data that their steps change.

    Steps get a session in an open transaction. Use `await MongoSagas.open(url)`, or work over a client of your own::

        saga_store = MongoSagas.over(AsyncMongoClient("mongodb://localhost/?replicaSet=rs0"))
    """

    WHAT, VERSION = "saga store", 3
    one_at_a_time = False

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.desk: SagaDesk = MongoSagaDesk(database)

    async def start(self, tx: Session, saga: NewSaga) -> bool:
        return await self.run(tx, _carry_out, lambda: saga_writing.start(saga, self._database.clock))

    async def post(self, tx: Session, mail: Sequence[NewMail]) -> int:
        return await self.run(tx, _carry_out, lambda: saga_writing.post(mail, self._database.clock))

    async def claim(
        self, worker: str, definitions: Collection[tuple[str, int]], *, limit: int, lease_seconds: float
    ) -> list[Record]:
        with told(self._database.where):
            found = await saga_claiming.candidates(self._database, definitions, limit)
        return await sparing(self, saga_claiming.Taking(worker, lease_seconds), found)

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        """Move the end of claims ahead. One that its owner is writing cannot be taken from it, and is left alone."""
        with told(self._database.where):
            held = await saga_claiming.held(self._database, claims)
        await sparing(self, saga_claiming.Renewing(lease_seconds), held)
        return frozenset(claim.saga_id for claim in held)

    async def load(self, tx: Session, saga_id: UUID, *, for_update: bool = False) -> Record | None:
        """Return a saga; it is locked in any case."""
        return await self.run(tx, saga_turns.load, saga_id)

    async def save(self, tx: Session, claim: Claim, turn: Turn, lease_seconds: float) -> datetime:
        return await self.run(tx, saga_turns.save, claim, turn, lease_seconds)

    async def undelivered(self, tx: Session, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        return await self.run(tx, saga_reading.undelivered, event_ids) if event_ids else {}

    async def prune(self, *, saga_days: float, audit_days: float, barrier_days: float) -> SagaPruned:
        """Remove what is older; also mail that came when its saga had just ended."""
        with told(self._database.where):
            return await saga_upkeep.prune(
                self, self._database, saga_days=saga_days, audit_days=audit_days, barrier_days=barrier_days
            )

    async def hint(self) -> None:
        """Do nothing: the server tells workers of every commit."""

    @asynccontextmanager
    async def wakeups(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Call `wake` when a saga was started or mail was posted, anywhere."""
        async with listening(self._database, wake, "saga_instance"), listening(self._database, wake, "saga_mailbox"):
            yield


async def _carry_out(lent: Lent, work: Callable[[], Steps[T]]) -> T:
    return await arun(work(), lent.session, lent.database.schema)
