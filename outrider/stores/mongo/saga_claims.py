"""Claims: the right of a worker to write a saga until a given time.

The search for candidates needs no transaction and is cheap, because there are rarely any. The claim is a transaction
that reads the candidates again and writes their instances. If two workers claim the same saga, the server rejects one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from pymongo.errors import OperationFailure

from outrider.saga.model import Claim, SagaRecord, Undelivered
from outrider.stores.mongo.database import Document, Documents, Expression, MongoDatabase, Session, milliseconds
from outrider.stores.mongo.documents import DEAF, INSTANCE, to_entry, to_instance, to_message
from outrider.stores.mongo.handler_transactions import MongoHandlerTransaction, MongoTransactionSource
from outrider.stores.rows import in_turn

BATCH = 100_000
"""The maximum of rows in one reply, large enough for all rows."""

PAGES = 4
"""The factor between wanted sagas and inspected messages, applied again for every further page."""

BRANCHES_MAX = 100
"""The maximum of definitions in one pipeline; the server allows a thousand stages."""

Definition = tuple[str, int]

_OWNERSHIP = {"owner": 1, "epoch": 1}

K = TypeVar("K")

T = TypeVar("T")

WRITE_CONFLICT = 112

Job = Callable[[MongoHandlerTransaction, Sequence[K]], Awaitable[Sequence[T]]]
"""A function that changes some sagas in a transaction and returns the results."""

Of = Callable[[str], Documents]
"""A function that returns a collection by name."""


async def candidates(
    database: MongoDatabase, definitions: Iterable[Definition], limit: int, suspects: int = 1
) -> list[UUID]:
    """Return claimable sagas: due sagas, suspects and sagas with messages in alternation, so that no kind starves."""
    rows: list[Document] = []
    wanted = sorted(set(definitions))
    for first in range(0, len(wanted), BRANCHES_MAX):
        pipeline = candidates_pipeline(wanted[first : first + BRANCHES_MAX], limit, database.now, suspects)
        rows += await (await database["saga_instance"].aggregate(pipeline, batchSize=BATCH)).to_list()
    due = sorted((row["wake_at"], row["saga_id"], row["suspect"]) for row in rows if "wake_at" in row)
    mailed: list[tuple[int, UUID]] = []
    for definition in wanted:
        page = [row for row in rows if "message_id" in row and _of(definition).items() <= row.items()]
        mailed += await _mailed(database, definition, page, limit)
    dead_letters = dict.fromkeys(saga_id for _, saga_id in sorted(mailed))
    lost = [saga_id for _, saga_id, suspect in due if suspect][:suspects]
    return in_turn([saga_id for _, saga_id, suspect in due if not suspect], lost, list(dead_letters))[:limit]


def candidates_pipeline(
    definitions: Sequence[Definition], limit: int, now: Expression, suspects: int = 1
) -> list[dict[str, Any]]:
    """Return the pipeline that finds due sagas, suspects and sagas with messages in one round trip."""
    due = [_due(definition, limit, now) for definition in definitions]
    due += [_due(definition, limit, now, ahead=True) for definition in definitions]
    for ahead in (False, True):
        due += [_due(definition, suspects, now, suspect=True, ahead=ahead) for definition in definitions if suspects]
    mailed = [_page(definition, PAGES * limit) for definition in definitions]
    return [
        *due[0],
        *({"$unionWith": {"coll": "saga_instance", "pipeline": branch}} for branch in due[1:]),
        *({"$unionWith": {"coll": "saga_mailbox", "pipeline": branch}} for branch in mailed),
    ]


def _due(
    definition: Definition, limit: int, now: Expression, *, suspect: bool = False, ahead: bool = False
) -> list[dict[str, Any]]:
    """Return the stages for due sagas of a definition, longest due first; saga_instance_due, saga_instance_lost.

    A suspect was lost with its worker more than once in a row. A claim that is `ahead` is from before the clock was set
    back by more than a lease; saga_instance_claimed.
    """
    time = "claimed_from" if ahead else "wake_at"
    past: Document = {time: {"$type": "date"}, "$expr": {"$gt" if ahead else "$lte": [f"${time}", now]}}
    past["losses"] = {"$gt": 0} if suspect else 0
    when = {"_id": 0, "saga_id": "$_id", "wake_at": 1, "suspect": {"$literal": suspect}}
    return [{"$match": {**_of(definition), **past}}, {"$sort": {time: 1}}, {"$limit": limit}, {"$project": when}]


async def _mailed(
    database: MongoDatabase, definition: Definition, page: Sequence[Document], limit: int
) -> list[tuple[int, UUID]]:
    """Return the free sagas of a page of messages. If most sagas have an owner, read further pages of growing size."""
    size = PAGES * limit
    found = [(row["message_id"], row["saga_id"]) for row in page if row["free"]]
    while len(page) == size and len(found) < limit:
        size *= PAGES
        rows = await database["saga_mailbox"].aggregate(
            _page(definition, size, page[-1]["message_id"]), batchSize=BATCH
        )
        page = await rows.to_list()
        found += [(row["message_id"], row["saga_id"]) for row in page if row["free"]]
    return found


def _page(definition: Definition, size: int, after: int = 0) -> list[dict[str, Any]]:
    """Return the stages for unseen messages, with a flag for free sagas: no owner, and not ended.

    The limit comes first, because the server would otherwise read ahead without end; saga_mailbox_unseen and the
    primary key.
    """
    resting = [{"$match": {"owner": None, "status": {"$nin": DEAF}}}, {"$project": {"_id": 1}}]
    saga = {"from": "saga_instance", "localField": "saga_id", "foreignField": "_id", "pipeline": resting, "as": "saga"}
    shown = {**dict.fromkeys(("saga_id", "message_id", "saga_type", "definition_version"), 1), "_id": 0}
    return [
        {"$match": {**_of(definition), "unseen": True, "message_id": {"$gt": after}}},
        {"$sort": {"message_id": 1}},
        {"$limit": size},
        {"$lookup": saga},
        {"$project": {**shown, "free": {"$ne": ["$saga", []]}}},
    ]


def _of(definition: Definition) -> Document:
    saga_type, version = definition
    return {"saga_type": saga_type, "definition_version": version}


@dataclass(frozen=True, slots=True)
class Taking:
    """A claim of sagas for a worker, with a complete read of the claimed sagas."""

    worker: str
    lease_seconds: float

    async def __call__(self, tx: MongoHandlerTransaction, ids: Sequence[UUID]) -> list[SagaRecord]:
        instances, these = tx.of("saga_instance"), {"_id": {"$in": list(ids)}}
        rows = await instances.find(these, facts(tx.now) | {"claimed_from": 1}, session=tx.session).to_list()
        parts = await read_parts(tx.of, tx.session, ids)
        free = [row for row in rows if _due_now(row) or _mailed_now(row, parts)]
        if not free:
            return []
        lease = timedelta(milliseconds=milliseconds(self.lease_seconds))
        until = free[0]["now"] + lease
        losses = {"$cond": [{"$eq": ["$owner", None]}, 0, {"$add": ["$losses", 1]}]}
        taken = {"owner": {"$literal": self.worker}, "wake_at": until, "losses": losses}
        taken["claimed_from"] = free[0]["now"] - lease
        change = [{"$set": {**taken, "epoch": {"$add": ["$epoch", 1]}}}]
        await instances.update_many({"_id": {"$in": [row["_id"] for row in free]}}, change, session=tx.session)
        return [parts.record(self._taken(row, until)) for row in free]

    def _taken(self, row: Document, until: datetime) -> Document:
        losses = 0 if row["owner"] is None else row["losses"] + 1
        return {**row, "owner": self.worker, "wake_at": until, "epoch": row["epoch"] + 1, "losses": losses}


def _due_now(row: Document) -> bool:
    due = row["wake_at"] is not None and row["wake_at"] <= row["now"]
    return due or (row.get("claimed_from") is not None and row["claimed_from"] > row["now"])


def _mailed_now(row: Document, parts: Parts) -> bool:
    return row["owner"] is None and row["status"] not in DEAF and row["_id"] in parts.unseen


async def renewed(database: MongoDatabase, claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims that are still valid; the primary key."""
    ids = {"_id": {"$in": [claim.saga_id for claim in claims]}}
    return _holding(claims, await database["saga_instance"].find(ids, _OWNERSHIP).to_list())


@dataclass(frozen=True, slots=True)
class MongoClaimRenewal:
    """The renewal of claims: sets a later end."""

    lease_seconds: float

    async def __call__(self, tx: MongoHandlerTransaction, claims: Sequence[Claim]) -> list[UUID]:
        instances, ids = tx.of("saga_instance"), [claim.saga_id for claim in claims]
        rows = await instances.find({"_id": {"$in": ids}}, _OWNERSHIP, session=tx.session).to_list()
        mine = [claim.saga_id for claim in _holding(claims, rows)]
        if mine:
            times = {"wake_at": self.lease_seconds, "claimed_from": -self.lease_seconds}
            ahead = [{"$set": {name: tx.database.after(seconds) for name, seconds in times.items()}}]
            await instances.update_many({"_id": {"$in": mine}}, ahead, session=tx.session)
        return mine


def _holding(claims: Sequence[Claim], rows: Iterable[Document]) -> list[Claim]:
    owners = {Claim(row["owner"], row["_id"], row["epoch"]) for row in rows if row["owner"] is not None}
    return [claim for claim in claims if claim in owners]


class _Locked(Exception):
    """Another transaction is writing one of the documents."""


async def skip_locked(transactions: MongoTransactionSource, job: Job[K, T], chosen: Sequence[K]) -> list[T]:
    """Run a job in as few transactions as possible. Locked documents are left out.

    ```python
    removed = await sparing(transactions, remove, ids)  # async def remove(tx, ids): ...
    ```
    """
    if not chosen:
        return []
    try:
        return list(await transactions.write(_at_once, job, chosen))
    except _Locked:
        if len(chosen) == 1:
            return []
        middle = len(chosen) // 2
        return [
            *await skip_locked(transactions, job, chosen[:middle]),
            *await skip_locked(transactions, job, chosen[middle:]),
        ]


async def _at_once(tx: MongoHandlerTransaction, job: Job[K, T], chosen: Sequence[K]) -> Sequence[T]:
    try:
        return await job(tx, chosen)
    except OperationFailure as error:
        if error.code == WRITE_CONFLICT:
            # A private exception prevents a retry of the same transaction.
            raise _Locked from error
        raise


class Parts:
    """The journals and messages of several sagas, and the ids of sagas with unseen messages."""

    def __init__(self, journal: Sequence[Document], messages: Sequence[Document]) -> None:
        self._journals, self._boxes = _by_saga(journal), _by_saga(messages)
        self.unseen = {row["saga_id"] for row in messages if row.get("unseen")}

    def record(self, row: Mapping[str, Any]) -> SagaRecord:
        """Return the saga of an instance that was read with `facts`."""
        journal = map(to_entry, self._journals[row["_id"]])
        messages = map(to_message, self._boxes[row["_id"]])
        return SagaRecord(
            to_instance(row),
            tuple(sorted(journal, key=lambda entry: (entry.phase, entry.position, entry.step))),
            tuple(sorted(messages, key=lambda message: message.message_id)),
            row["now"],
        )


def facts(now: Expression) -> Document:
    """Return the projection of an instance: all fields and the current time."""
    return {**dict.fromkeys(INSTANCE, 1), "now": {"$toDate": now}}


async def read_parts(of: Of, session: Session, ids: Sequence[UUID]) -> Parts:
    """Read journals and messages of sagas; saga_step_line and saga_mailbox_order."""
    mine = {"saga_id": {"$in": list(ids)}}
    journal = await of("saga_step").find(mine, session=session).to_list()
    return Parts(journal, await of("saga_mailbox").find(mine, session=session).to_list())


async def undelivered(tx: MongoHandlerTransaction, event_ids: Sequence[UUID]) -> dict[UUID, Undelivered]:
    """Return the events that are still in the outbox or among the dead letters; by their primary keys."""
    found: dict[UUID, Undelivered] = {}
    for name, state in (("outbox_dead_letter", Undelivered.DEAD_LETTER), ("outbox", Undelivered.WAITING)):
        rows = tx.of(name).find({"_id": {"$in": list(event_ids)}}, {"_id": 1}, session=tx.session)
        found |= {row["_id"]: state for row in await rows.to_list()}
    return found


def _by_saga(rows: Sequence[Document]) -> Mapping[UUID, list[Document]]:
    found: dict[UUID, list[Document]] = defaultdict(list)
    for row in rows:
        found[row["saga_id"]].append(row)
    return found
