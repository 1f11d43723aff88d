"""Sagas in PostgreSQL: what a worker needs.

A claim is one statement that passes over what others are writing. What it has claimed is read by later statements,
which see whatever the last owner has written. A turn is one statement too, fenced by claim and version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from outrider.errors import ConcurrencyError, UnfitHandler
from outrider.saga_store import Claim, NewMail, NewSaga, Record, SagaDesk, SagaPruned, Turn, Undelivered
from outrider.stores.lending import ENDED
from outrider.stores.postgres import queries
from outrider.stores.postgres.database import Database
from outrider.stores.postgres.lending import Lending
from outrider.stores.postgres.saga_desk import PostgresSagaDesk
from outrider.stores.postgres.saga_parameters import post_parameters, save_parameters, start_parameters
from outrider.stores.postgres.saga_reading import records
from outrider.stores.postgres.transaction import handling
from outrider.stores.postgres.wakeup import Hints


class PostgresSagas(Lending):
    """Sagas in PostgreSQL, beside the data that their steps change.

    Open it with `await PostgresSagas.open(url)`, or over a pool of your own with `PostgresSagas.over(pool)`.
    """

    WHAT, LAST_STEP, LOCKED = "saga store", "saga_barrier_age", "saga, mail or barrier"
    one_at_a_time = False

    def __init__(self, database: Database, *, schema: str = "outrider") -> None:
        super().__init__(database, schema=schema)
        self.sql = queries.load_saga(schema)
        self.desk: SagaDesk = PostgresSagaDesk(database, schema)
        self._hints = Hints(database, f"{schema[:50]}_saga")

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        # Turns never wait for a connection that a step's function may have, so they are always on our own.
        return handling(self._database)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        async with super().lend() as tx:
            try:
                yield tx
            finally:
                self._lent.pop(id(tx), None)

    async def call(self, function: Callable[..., Any], argument: Any, tx: Any) -> Any:
        try:
            return await super().call(function, argument, tx)
        except Exception as error:
            if isinstance(error, UnfitHandler) or not await self._has_committed(self._lent.get(id(tx))):
                raise
            raise UnfitHandler(ENDED) from error

    async def start(self, tx: Any, saga: NewSaga) -> bool:
        return bool(await self.run(tx, "start", *start_parameters(saga)))

    async def post(self, tx: Any, mail: Sequence[NewMail]) -> int:
        return len(await self.run(tx, "post", *post_parameters(mail))) if mail else 0

    async def claim(
        self, worker: str, definitions: Collection[tuple[str, int]], *, limit: int, lease_seconds: float
    ) -> list[Record]:
        wanted = [list(column) for column in zip(*sorted(set(definitions)), strict=True)]
        if not wanted:
            return []
        async with self._database.statement() as conn:
            run = partial(self.run, conn)
            return await records(run, await run("claim", worker, *wanted, limit, lease_seconds))

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        if not claims:
            return frozenset()
        columns = [c.saga_id for c in claims], [c.worker for c in claims], [c.epoch for c in claims]
        rows = await self._database.fetch(self.sql["renew"], *columns, lease_seconds)
        return frozenset(row["saga_id"] for row in rows)

    async def load(self, tx: Any, saga_id: UUID, *, for_update: bool = False) -> Record | None:
        run = partial(self.run, tx)
        rows = await run("load_for_update" if for_update else "load", saga_id)
        if rows and for_update:
            self._lent[id(tx)] = rows[0]["transaction"]
            rows = [tuple(row)[:-1] for row in rows]
        found = await records(run, rows)
        return found[0] if found else None

    async def save(self, tx: Any, claim: Claim, turn: Turn, lease_seconds: float) -> datetime:
        rows = await self.run(tx, "save", *save_parameters(claim, turn, lease_seconds))
        if not rows:
            raise ConcurrencyError(
                f"saga {claim.saga_id} has another owner or version by now; nothing was written: claim it again"
            )
        if self._lent.get(id(tx)) not in (None, rows[0]["transaction"]):
            raise UnfitHandler(ENDED)
        now: datetime = rows[0]["now"]
        return now

    async def undelivered(self, tx: Any, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        rows = await self.run(tx, "undelivered", list(event_ids))
        return {event_id: Undelivered(place) for event_id, place in rows}

    async def prune(self, *, saga_days: float, audit_days: float, barrier_days: float) -> SagaPruned:
        """Remove what is older; also mail that came when its saga had just ended."""
        await self._database.execute(self.sql["drop_strays"])
        return SagaPruned(
            await self._in_batches("prune_sagas", saga_days),
            await self._in_batches("prune_notes", audit_days),
            await self._in_batches("prune_barriers", barrier_days),
        )

    async def hint(self) -> None:
        """Tell workers, after a commit, that mail or a saga has arrived."""
        await self._hints.send()

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._hints.listening(wake)

    async def close(self) -> None:
        await self._hints.close()
        await super().close()
