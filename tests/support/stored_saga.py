"""One stored saga, with the rules of the store contract: claims, fence, version, messages that are taken or seen."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from outrider.saga.model import AuditEntry, Instance, JournalEntry, MessageKind, Phase, SagaMessage, SagaRecord, Status
from outrider.saga.planner.planner import Plan

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
LEASE_SECONDS = 15.0
SAGA_ID = UUID(int=5)


class Fenced(Exception):
    """Another worker has the saga."""


def fresh() -> Instance:
    return Instance(
        saga_id=SAGA_ID,
        saga_type="order",
        definition_version=1,
        correlation_id="A-7",
        state=b"{}",
        status=Status.STARTED,
        current_step=None,
        version=1,
        last_error=None,
        retry_count=0,
        needs_attention=False,
        traceparent=None,
        started_at=EPOCH,
        updated_at=EPOCH,
        ended_at=None,
        wake_at=EPOCH,
        owner=None,
        epoch=0,
    )


@dataclass(slots=True)
class StoredSaga:
    """The saga as stored, and the time as the database tells it."""

    now: datetime = EPOCH
    instance: Instance = field(default_factory=fresh)
    journal: dict[tuple[str, Phase], JournalEntry] = field(default_factory=dict)
    messages: dict[int, SagaMessage] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    events: set[UUID] = field(default_factory=set)
    notes: list[AuditEntry] = field(default_factory=list)
    delivered: int = 0

    def load(self) -> SagaRecord:
        return SagaRecord(self.instance, tuple(self.journal.values()), tuple(self.messages.values()), self.now)

    def due(self) -> bool:
        wake_at = self.instance.wake_at
        unseen = bool(self.messages.keys() - self.seen) and self.instance.owner is None
        return unseen or (wake_at is not None and wake_at <= self.now)

    def claim(self, worker: str) -> int | None:
        """Take the saga; return the epoch of the claim."""
        if not self.due():
            return None
        wake_at = self.now + timedelta(seconds=LEASE_SECONDS)
        losses = 0 if self.instance.owner is None else self.instance.losses + 1
        taken = replace(self.instance, owner=worker, epoch=self.instance.epoch + 1, losses=losses)
        self.instance = replace(taken, wake_at=wake_at)
        return self.instance.epoch

    def renew(self, worker: str, epoch: int) -> None:
        if (self.instance.owner, self.instance.epoch) == (worker, epoch):
            self.instance = replace(self.instance, wake_at=self.now + timedelta(seconds=LEASE_SECONDS))

    def save(self, worker: str, epoch: int, plan: Plan) -> None:
        """Write a turn, or nothing."""
        held = self.instance
        if (held.owner, held.epoch, held.version) != (worker, epoch, plan.instance.version):
            raise Fenced
        self.journal |= {(entry.step, entry.phase): entry for entry in plan.entries}
        for message_id in plan.taken:
            self.messages.pop(message_id, None)
        self.seen |= set(plan.seen)
        self.notes += plan.notes
        seconds = plan.wake_seconds if plan.release else LEASE_SECONDS
        self.instance = replace(
            plan.instance,
            version=held.version + 1,
            owner=None if plan.release else worker,
            losses=0 if plan.release else plan.instance.losses,
            epoch=held.epoch,
            wake_at=None if seconds is None else self.now + timedelta(seconds=seconds),
        )

    def deliver(self, kind: MessageKind, name: str, key: str | None, event_id: UUID) -> None:
        over = self.instance.status in (Status.COMPLETED, Status.COMPENSATED)
        if over or event_id in self.events:
            return
        self.events.add(event_id)
        self.delivered += 1
        body = json.dumps({"actor": "ann"} if kind is MessageKind.OPERATOR else {}).encode()
        self.messages[self.delivered] = SagaMessage(self.delivered, kind, name, key, body, event_id, self.now)
