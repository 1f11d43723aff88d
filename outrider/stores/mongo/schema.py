"""Installing and upgrading the collections.

MongoDB makes collections and indexes outside of transactions, so a step is done first and recorded after. Every step
can be repeated, therefore a run that broke off resumes, and two migrators do each other no harm.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pymongo import UpdateOne
from pymongo.errors import CollectionInvalid, OperationFailure

from outrider.errors import BadSetting
from outrider.event import BANDS
from outrider.stores import migrations
from outrider.stores.migrations import Progress, Step
from outrider.stores.mongo import inbox_collections, outbox_collections, saga_collections
from outrider.stores.mongo.collections import SEED, command_of, steps
from outrider.stores.mongo.database import Database
from outrider.stores.mongo.errors import translated
from outrider.stores.mongo.place import check_url
from outrider.stores.queries import identifier

LANES_MAX = 1024
RECORD = "outrider_migration"
ALREADY_THERE = 48

STEPS: tuple[Step, ...] = (
    *steps(1, "0001_outbox", outbox_collections.COLLECTIONS),
    *steps(2, "0002_inbox", inbox_collections.COLLECTIONS),
    *steps(3, "0003_saga", saga_collections.COLLECTIONS),
)


class MongoSchema:
    """Migrations of one database. The number of lanes counts at the first migration only.

    >>> MongoSchema("mongodb://localhost/?replicaSet=rs0", schema="shop").schema
    'shop'
    """

    def __init__(self, url: str, *, schema: str = "outrider", lanes: int = 32) -> None:
        if not 1 <= lanes <= LANES_MAX:
            raise BadSetting(f"lanes = {lanes} cannot work; use 1 to {LANES_MAX}, 32 suits most")
        self.url, self.schema, self._lanes = url, identifier(schema), lanes
        check_url(url)

    async def status(self) -> list[Progress]:
        """Say how far each migration has come; changes nothing."""
        async with self._opened() as database:
            return migrations.progress(STEPS, await applied(database))

    async def plan(self) -> list[Step]:
        """Return the steps that `migrate` would run; changes nothing."""
        async with self._opened() as database:
            return migrations.pending(STEPS, await applied(database))

    async def migrate(self) -> list[Step]:
        """Run what is still to be done, record each step, and return them."""
        async with self._opened() as database:
            todo = migrations.pending(STEPS, await applied(database))
            for step in todo:
                await self._apply(database, step)
            return todo

    async def _apply(self, database: Database, step: Step) -> None:
        command = command_of(step)
        if SEED in command:
            await _seed_lanes(database, self._lanes)
        else:
            await _make(database, command)
        facts = {"checksum": step.checksum, "applied_at": "$$NOW"}
        place = {"version": step.version, "step": step.name}
        # A pipeline, so that the time is the server's. Who comes second writes the same.
        await database[RECORD].update_one({"_id": place}, [{"$set": facts}], upsert=True)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Database]:
        database = await Database.open(self.url, self.schema)
        try:
            with translated(database.where):
                yield database
        finally:
            await database.close()


async def applied(database: Database) -> dict[tuple[int, str], str]:
    """Return the recorded steps with their checksums; none where nothing is installed."""
    with translated(database.where):
        rows = await database[RECORD].find().to_list()
    return {(row["_id"]["version"], row["_id"]["step"]): row["checksum"] for row in rows}


async def installed(database: Database, version: int) -> bool:
    """Tell whether every step of a migration has been taken.

    ```python
    if not await installed(database, version=2):
        raise Misuse("the inbox is not installed; run: outrider db migrate")
    ```
    """
    done = await applied(database)
    return all((step.version, step.name) in done for step in STEPS if step.version == version)


async def _make(database: Database, command: dict[str, object]) -> None:
    """Make a collection or an index, unless it is there: an earlier run may have ended before its record."""
    try:
        await database.client[database.schema].command(command)
    except (CollectionInvalid, OperationFailure) as error:
        if getattr(error, "code", None) != ALREADY_THERE:
            raise


async def _seed_lanes(database: Database, lanes: int) -> None:
    """Fix the number of lanes, and make one free document for each. The first migrator's number counts."""
    meta = database["outbox_meta"]
    await meta.update_one({"_id": "lanes"}, {"$setOnInsert": {"value": lanes}}, upsert=True)
    found = await meta.find_one({"_id": "lanes"})
    assert found is not None, "it was there a moment ago, and nobody removes it"
    free = {"$setOnInsert": {"owner": None, "epoch": 0, "turn": 0}}
    lane_documents = [UpdateOne({"_id": lane}, free, upsert=True) for lane in range(BANDS * found["value"])]
    await database["outbox_lane"].bulk_write(lane_documents, ordered=False)
