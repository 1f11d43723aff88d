"""Sagas in MongoDB: the operations of a worker.

Every save writes the instance, so two saves of one saga conflict there, and so do a save and a claim. A post only
inserts messages and conflicts with no save.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any, Self, TypeVar
from uuid import UUID

from pymongo import AsyncMongoClient, ReplaceOne, ReturnDocument

from outrider.audit_chain import first_line
from outrider.clock import Clock
from outrider.errors import ConcurrencyError, UsageError
from outrider.saga.model import (
    Claim,
    NewSaga,
    NewSagaMessage,
    ParticipantEntry,
    Phase,
    SagaChange,
    SagaPruned,
    SagaRecord,
    Undelivered,
)
from outrider.saga.store import SagaAdmin
from outrider.stores.mongo import saga_admin, saga_claims
from outrider.stores.mongo.audit import MongoAudit
from outrider.stores.mongo.database import NOT_INSTALLED, Document, MongoDatabase, is_unauthorized, now_expression
from outrider.stores.mongo.documents import (
    DEAF,
    audit_document,
    line,
    message_identity,
    message_row,
    participant_id,
    saved,
    started,
)
from outrider.stores.mongo.handler_transactions import (
    MongoHandlerTransaction,
    MongoTransactionSource,
    open_installed,
    translate_errors,
)
from outrider.stores.mongo.operations import Operations, operation, run_operations_async
from outrider.stores.mongo.saga_admin import MongoSagaAdmin
from outrider.stores.mongo.saga_claims import facts, read_parts, skip_locked
from outrider.stores.mongo.wakeup import listening
from outrider.stores.rows import SagaWriteSet

T = TypeVar("T")

Seen = dict[str, Any]
"""The documents found, by collection name, and `now`."""

# All fields that the callers need. States and bodies may be large and are never read here.
_FACTS = {"$project": {"saga_type": 1, "definition_version": 1, "barred": 1, "reply": 1}}


async def load(tx: MongoHandlerTransaction, saga_id: UUID) -> SagaRecord | None:
    """Lock a saga and read it completely; the primary key."""
    # A plain read would prevent a later save: a renewed claim would conflict.
    row = await tx.of("saga_instance").find_one_and_update(
        {"_id": saga_id},
        {"$inc": {"turns": 1}},
        facts(tx.now),
        return_document=ReturnDocument.AFTER,
        session=tx.session,
    )
    return (await read_parts(tx.of, tx.session, [saga_id])).record(row) if row else None


def deliver(messages: Sequence[NewSagaMessage], clock: Clock | None = None) -> Operations[int]:
    """Insert messages for sagas that may still read them; return the number of new messages.

    The instance is only read, so a post never blocks a save of the owner. A message that comes while a saga is owned
    stays unseen, and a free saga with unseen messages can be claimed. Therefore no message is lost, whichever commit
    comes first.
    """
    if not messages:
        return 0
    by_event: dict[tuple[UUID, UUID], NewSagaMessage] = {}
    for message in messages:
        by_event.setdefault((message.saga_id, message.event_id), message)
    listening = {"_id": {"$in": list({message.saga_id for message in messages})}, "status": {"$nin": DEAF}}
    known = {"_id": {"$in": [message_identity(*identity) for identity in by_event]}}
    seen = yield from read_documents(clock, saga_instance=listening, saga_mailbox=known)
    sagas = {row["_id"]: row for row in seen["saga_instance"]}
    old = {(row["_id"]["saga_id"], row["_id"]["event_id"]) for row in seen["saga_mailbox"]}
    fresh = [message for identity, message in by_event.items() if identity not in old and _meant(message, sagas)]
    if fresh:
        documents = [message_row(message, sagas[message.saga_id], seen["now"]) for message in fresh]
        yield operation("saga_mailbox", "insert_many", documents)
    return len(fresh)


async def save(tx: MongoHandlerTransaction, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
    """Write a turn if claim and version are as expected; otherwise write nothing."""
    writes = SagaWriteSet.of(turn, lease_seconds)
    row = await _save_instance(tx, claim, writes, turn.release)
    if row is None:
        raise ConcurrencyError(
            f"saga {claim.saga_id} has another owner or version by now; nothing was written: claim it again"
        )
    now: datetime = row["updated_at"]
    await _save_journal(tx, claim.saga_id, writes)
    await _save_messages(tx, claim.saga_id, writes)
    first = row["notes"] - len(writes.lines) + 1
    lines = [audit_document(each, number) for number, each in enumerate(writes.lines, first)]
    if lines:
        await tx.of("saga_audit_log").insert_many(lines, session=tx.session)
    return now


def start(saga: NewSaga, clock: Clock | None = None) -> Operations[bool]:
    """Insert an instance that is due at once, with the first entry of its audit log. Return False if it exists."""
    name = {"saga_type": saga.saga_type, "correlation_id": saga.correlation_id}
    seen = yield from read_documents(clock, saga_instance={"$or": [{"_id": saga.saga_id}, name]})
    if seen["saga_instance"]:
        return False
    document = started(saga, seen["now"])
    yield operation("saga_instance", "insert_one", document)
    audit = audit_document(first_line(saga.saga_id, seen["now"], saga.traceparent), document["notes"])
    yield operation("saga_audit_log", "insert_one", audit)
    return True


class MongoSagas:
    """Sagas in MongoDB, beside the data that their steps change.

    Steps get a session in an open transaction. Use `await MongoSagas.open(url)`, or pass a client of the application::

        saga_store = MongoSagas.over(AsyncMongoClient("mongodb://localhost/?replicaSet=rs0"))
    """

    one_at_a_time = False

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database
        self.transactions = MongoTransactionSource(database)
        self.admin: SagaAdmin = MongoSagaAdmin(database)
        self.audit = MongoAudit(self.transactions, database)

    @classmethod
    async def open(cls, url: str, *, schema: str = "outrider", clock: Clock | None = None) -> Self:
        """Connect to an installed saga store. A missing installation and a server without transactions are rejected::

        saga_store = await MongoSagas.open("mongodb://localhost/?replicaSet=rs0")
        """
        return cls(await open_installed(url, schema, what="saga store", version=3, clock=clock))

    @classmethod
    def over(cls, client: AsyncMongoClient[Document], *, schema: str = "outrider", clock: Clock | None = None) -> Self:
        """Work through a client of the application. The application closes the client::

        saga_store = MongoSagas.over(AsyncMongoClient("mongodb://localhost/?replicaSet=rs0"))
        """
        return cls(MongoDatabase.over(client, schema, clock=clock))

    def transaction(self) -> AbstractAsyncContextManager[MongoHandlerTransaction]:
        return self.transactions.open()

    async def start(self, tx: MongoHandlerTransaction, saga: NewSaga) -> bool:
        return await tx.run(_carry_out, lambda: start(saga, self._database.clock))

    async def deliver(self, tx: MongoHandlerTransaction, messages: Sequence[NewSagaMessage]) -> int:
        return await tx.run(_carry_out, lambda: deliver(messages, self._database.clock))

    async def claim(
        self,
        worker: str,
        definitions: Collection[tuple[str, int]],
        *,
        limit: int,
        lease_seconds: float,
        suspects: int = 1,
    ) -> list[SagaRecord]:
        with translate_errors(self._database.where):
            found = await saga_claims.candidates(self._database, definitions, limit, suspects)
        return await skip_locked(self.transactions, saga_claims.Taking(worker, lease_seconds), found)

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        """Extend claims. An instance that its owner is writing cannot be taken over and needs no extension."""
        with translate_errors(self._database.where):
            renewed = await saga_claims.renewed(self._database, claims)
        await skip_locked(self.transactions, saga_claims.MongoClaimRenewal(lease_seconds), renewed)
        return frozenset(claim.saga_id for claim in renewed)

    async def load(self, tx: MongoHandlerTransaction, saga_id: UUID, *, for_update: bool = False) -> SagaRecord | None:
        """Return a saga. The saga is always locked, whatever `for_update` says."""
        return await tx.run(load, saga_id)

    async def save(self, tx: MongoHandlerTransaction, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        return await tx.run(save, claim, turn, lease_seconds)

    async def undelivered(self, tx: MongoHandlerTransaction, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        return await tx.run(saga_claims.undelivered, event_ids) if event_ids else {}

    async def prune(self, *, saga_days: float, audit_days: float, participant_memory_days: float) -> SagaPruned:
        """Remove old rows. Also remove messages that came just after the end of their saga."""
        with translate_errors(self._database.where):
            await saga_admin.drop_unread_messages(self._database)
            return SagaPruned(
                await self.audit.remove_sagas(saga_days),
                await self._remove_lines(audit_days),
                await saga_admin.prune_participants(self._database, participant_memory_days),
            )

    async def _remove_lines(self, days: float) -> int:
        try:
            return await self.audit.remove_lines(days)
        except UsageError as error:
            # The role of the workers need not have the right to remove: `outrider audit prune` does it with another.
            if is_unauthorized(error):
                return 0
            raise

    async def notify(self) -> None:
        """Do nothing: the server notifies workers of every commit."""

    @asynccontextmanager
    async def listen(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Call `wake` after a saga was started or a message was posted by any process."""
        async with listening(self._database, wake, "saga_instance"), listening(self._database, wake, "saga_mailbox"):
            yield

    async def close(self) -> None:
        await self._database.close()


async def _carry_out(tx: MongoHandlerTransaction, work: Callable[[], Operations[T]]) -> T:
    return await run_operations_async(work(), tx.session, tx.database.schema)


async def _save_instance(
    tx: MongoHandlerTransaction, claim: Claim, writes: SagaWriteSet, release: bool
) -> Document | None:
    """The primary key."""
    fence = {"_id": claim.saga_id, "owner": claim.worker, "epoch": claim.epoch, "version": writes.instance.version}
    due_at = None if writes.due_seconds is None else tx.database.after(writes.due_seconds)
    claimed_from = None if release or writes.due_seconds is None else tx.database.after(-writes.due_seconds)
    return await tx.of("saga_instance").find_one_and_update(
        fence,
        saved(writes, tx.now, due_at, claimed_from),
        {"updated_at": 1, "notes": 1},
        return_document=ReturnDocument.AFTER,
        session=tx.session,
    )


async def _save_journal(tx: MongoHandlerTransaction, saga_id: UUID, writes: SagaWriteSet) -> None:
    """Replace journal entries; saga_step_line."""
    lines = [line(saga_id, entry) for entry in writes.entries]
    identities = [{name: each[name] for name in ("saga_id", "step", "phase")} for each in lines]
    changes = [ReplaceOne(identity, each, upsert=True) for identity, each in zip(identities, lines, strict=True)]
    if changes:
        await tx.of("saga_step").bulk_write(changes, session=tx.session)


async def _save_messages(tx: MongoHandlerTransaction, saga_id: UUID, writes: SagaWriteSet) -> None:
    """Delete consumed messages; mark seen messages, which then wake no worker; saga_mailbox_order."""
    box = tx.of("saga_mailbox")
    if writes.taken:
        await box.delete_many(_pieces(saga_id, writes.taken), session=tx.session)
    if writes.seen:
        await box.update_many(_pieces(saga_id, writes.seen), {"$unset": {"unseen": ""}}, session=tx.session)


def _pieces(saga_id: UUID, numbers: Sequence[int]) -> Document:
    return {"saga_id": saga_id, "message_id": {"$in": list(numbers)}}


def _meant(message: NewSagaMessage, sagas: Mapping[UUID, Document]) -> bool:
    found = sagas.get(message.saga_id)
    return found is not None and message.saga_type in (None, found["saga_type"])


def enter(participant: str, key: str, phase: Phase, clock: Clock | None = None) -> Operations[ParticipantEntry]:
    """Register a command at a participant. A compensation first bars its action, unless the action has come."""
    identities = {each: participant_id(participant, key, each) for each in Phase}
    seen = yield from read_documents(clock, saga_barrier={"_id": {"$in": list(identities.values())}})
    known = {Phase(row["_id"]["phase"]): row for row in seen["saga_barrier"]}
    if before := known.get(phase):
        reply = before.get("reply")
        return ParticipantEntry(False, before["barred"], None if reply is None else reply.encode())
    barred = phase is Phase.COMPENSATION and Phase.ACTION not in known
    arrived = [Phase.ACTION, phase] if barred else [phase]
    documents = [{"_id": identities[each], "barred": barred, "at": seen["now"]} for each in arrived]
    yield operation("saga_barrier", "insert_many", documents)
    return ParticipantEntry(True, barred)


def save_reply(participant: str, key: str, phase: Phase, reply: bytes) -> Operations[None]:
    """Store the reply to a command."""
    identity = {"_id": participant_id(participant, key, phase)}
    yield operation("saga_barrier", "update_one", identity, {"$set": {"reply": reply.decode()}})


def read_documents(clock: Clock | None, **wanted: Document) -> Operations[Seen]:
    """Query the current time and documents of several collections in one round trip."""
    pipeline: list[Document] = [{"$match": {"_id": "lanes"}}, {"$project": {"now": now_expression(clock)}}]
    for name, condition in wanted.items():
        pipeline.append({"$lookup": {"from": name, "pipeline": [{"$match": condition}, _FACTS], "as": name}})
    rows = yield operation("outbox_meta", "aggregate", pipeline)
    if not rows:
        raise UsageError(f"the saga store is not installed in this database; {NOT_INSTALLED}")
    seen: Seen = rows[0]
    return seen
