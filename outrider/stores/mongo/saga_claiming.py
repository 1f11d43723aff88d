"""Claims: who may write a saga, and for how long.

Candidates are looked for without a transaction, which is cheap, and nearly always there are none. They are taken in a
transaction that reads them anew and writes their instances; of two that take the same one, the server refuses one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from outrider.saga_store import Claim, Record
from outrider.stores.mongo.database import Database, Document, Expression, milliseconds
from outrider.stores.mongo.lending import Lent
from outrider.stores.mongo.saga_documents import DEAF
from outrider.stores.mongo.saga_reading import Parts, facts, read_parts
from outrider.stores.saga_rows import in_turn

BATCH = 100_000
"""Rows in one reply; all of them, that is."""

PAGES = 4
"""How much more mail is looked at than sagas are wanted, and how much more than that the next time."""

BRANCHES_MAX = 100
"""Definitions looked at in one pipeline; the server takes a thousand stages."""

Definition = tuple[str, int]


async def candidates(database: Database, definitions: Iterable[Definition], limit: int) -> list[UUID]:
    """Return what may be claimed: the two kinds in turn, so neither waits for the end of the other."""
    rows: list[Document] = []
    wanted = sorted(set(definitions))
    for first in range(0, len(wanted), BRANCHES_MAX):
        pipeline = candidates_pipeline(wanted[first : first + BRANCHES_MAX], limit, database.now)
        rows += await (await database["saga_instance"].aggregate(pipeline, batchSize=BATCH)).to_list()
    due = sorted((row["wake_at"], row["saga_id"]) for row in rows if "wake_at" in row)
    mailed: list[tuple[int, UUID]] = []
    for definition in wanted:
        page = [row for row in rows if "mail_id" in row and _of(definition).items() <= row.items()]
        mailed += await _mailed(database, definition, page, limit)
    letters = dict.fromkeys(saga_id for _, saga_id in sorted(mailed))
    return in_turn([saga_id for _, saga_id in due], list(letters))[:limit]


def candidates_pipeline(definitions: Sequence[Definition], limit: int, now: Expression) -> list[dict[str, Any]]:
    """Return the pipeline over instances that finds what is due and what has mail, in one round trip."""
    due = [_due(definition, limit, now) for definition in definitions]
    mailed = [_page(definition, PAGES * limit) for definition in definitions]
    return [
        *due[0],
        *({"$unionWith": {"coll": "saga_instance", "pipeline": branch}} for branch in due[1:]),
        *({"$unionWith": {"coll": "saga_mailbox", "pipeline": branch}} for branch in mailed),
    ]


def _due(definition: Definition, limit: int, now: Expression) -> list[dict[str, Any]]:
    """What is due of a definition, longest first; saga_instance_due."""
    past = {"wake_at": {"$type": "date"}, "$expr": {"$lte": ["$wake_at", now]}}
    when = {"_id": 0, "saga_id": "$_id", "wake_at": 1}
    return [{"$match": {**_of(definition), **past}}, {"$sort": {"wake_at": 1}}, {"$limit": limit}, {"$project": when}]


async def _mailed(
    database: Database, definition: Definition, page: Sequence[Document], limit: int
) -> list[tuple[int, UUID]]:
    """Return the free sagas of a page of mail; where most have an owner, look further on, in growing steps."""
    size = PAGES * limit
    found = [(row["mail_id"], row["saga_id"]) for row in page if row["free"]]
    while len(page) == size and len(found) < limit:
        size *= PAGES
        rows = await database["saga_mailbox"].aggregate(_page(definition, size, page[-1]["mail_id"]), batchSize=BATCH)
        page = await rows.to_list()
        found += [(row["mail_id"], row["saga_id"]) for row in page if row["free"]]
    return found


def _page(definition: Definition, size: int, after: int = 0) -> list[dict[str, Any]]:
    """Unseen mail, and whether its saga is free: without an owner, and not at its end.

    The limit comes first, since the server would read ahead without end; saga_mailbox_unseen and the primary key.
    """
    resting = [{"$match": {"owner": None, "status": {"$nin": DEAF}}}, {"$project": {"_id": 1}}]
    saga = {"from": "saga_instance", "localField": "saga_id", "foreignField": "_id", "pipeline": resting, "as": "saga"}
    shown = {**dict.fromkeys(("saga_id", "mail_id", "saga_type", "definition_version"), 1), "_id": 0}
    return [
        {"$match": {**_of(definition), "unseen": True, "mail_id": {"$gt": after}}},
        {"$sort": {"mail_id": 1}},
        {"$limit": size},
        {"$lookup": saga},
        {"$project": {**shown, "free": {"$ne": ["$saga", []]}}},
    ]


def _of(definition: Definition) -> Document:
    saga_type, version = definition
    return {"saga_type": saga_type, "definition_version": version}


@dataclass(frozen=True, slots=True)
class Taking:
    """Takes sagas for a worker, and reads them whole."""

    worker: str
    lease_seconds: float

    async def __call__(self, lent: Lent, ids: Sequence[UUID]) -> list[Record]:
        instances, these = lent.of("saga_instance"), {"_id": {"$in": list(ids)}}
        rows = await instances.find(these, facts(lent.now), session=lent.session).to_list()
        parts = await read_parts(lent.of, lent.session, ids)
        free = [row for row in rows if _due_now(row) or _mailed_now(row, parts)]
        if not free:
            return []
        until = free[0]["now"] + timedelta(milliseconds=milliseconds(self.lease_seconds))
        change = {"$set": {"owner": self.worker, "wake_at": until}, "$inc": {"epoch": 1}}
        await instances.update_many({"_id": {"$in": [row["_id"] for row in free]}}, change, session=lent.session)
        taken = {"owner": self.worker, "wake_at": until}
        return [parts.record({**row, **taken, "epoch": row["epoch"] + 1}) for row in free]


def _due_now(row: Document) -> bool:
    """Tell whether a candidate is still due."""
    return row["wake_at"] is not None and row["wake_at"] <= row["now"]


def _mailed_now(row: Document, parts: Parts) -> bool:
    """Tell whether a candidate still has unseen mail and no owner."""
    return row["owner"] is None and row["status"] not in DEAF and row["_id"] in parts.unseen


async def held(database: Database, claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims that still hold; the primary key."""
    ids = {"_id": {"$in": [claim.saga_id for claim in claims]}}
    return _holding(claims, await database["saga_instance"].find(ids, _OWNERSHIP).to_list())


@dataclass(frozen=True, slots=True)
class Renewing:
    """Moves the end of claims ahead."""

    lease_seconds: float

    async def __call__(self, lent: Lent, claims: Sequence[Claim]) -> list[UUID]:
        instances, ids = lent.of("saga_instance"), [claim.saga_id for claim in claims]
        rows = await instances.find({"_id": {"$in": ids}}, _OWNERSHIP, session=lent.session).to_list()
        mine = [claim.saga_id for claim in _holding(claims, rows)]
        if mine:
            ahead = [{"$set": {"wake_at": lent.database.after(self.lease_seconds)}}]
            await instances.update_many({"_id": {"$in": mine}}, ahead, session=lent.session)
        return mine


_OWNERSHIP = {"owner": 1, "epoch": 1}


def _holding(claims: Sequence[Claim], rows: Iterable[Document]) -> list[Claim]:
    owners = {Claim(row["owner"], row["_id"], row["epoch"]) for row in rows if row["owner"] is not None}
    return [claim for claim in claims if claim in owners]
