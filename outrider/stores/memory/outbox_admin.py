"""Admin operations of the outbox in memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outrider.errors import NotFound, Transient
from outrider.event import DeadLetterReason, OnDeadLetter, Stream
from outrider.outbox import model
from outrider.outbox.model import (
    FETCHABLE,
    BlockedStream,
    BlockReason,
    Criteria,
    DeadLettered,
    DeadLetterEdit,
    JournalKind,
    State,
)
from outrider.stores.memory.journal import add
from outrider.stores.memory.outbox_settle import MemorySettlement
from outrider.stores.memory.tables import BlockRow, DeadRow, OutboxTableRow, skipped_marker

if TYPE_CHECKING:
    from outrider.stores.memory.outbox import MemoryStore


class MemoryOutboxAdmin:
    """The admin of the outbox: lists, replays, dead-letters and discards events."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def counts(self, *, sent: bool = True) -> dict[str, int]:
        tables = self._store.tables
        states = Counter(str(row.event.state) for row in tables.rows.values())
        archived = {str(State.SENT): len(tables.archive)} if sent else {}
        return {**states, **archived, str(State.DEAD_LETTER): len(tables.dead)}

    async def events(self, criteria: Criteria) -> list[dict[str, Any]]:
        tables = self._store.tables
        if criteria.state == State.SENT:
            found = [
                {**_facts(row), "state": State.SENT, "sent_at": at} for row, at in reversed(tables.archive.values())
            ]
        else:
            found = [_facts(tables.rows[position]) for position in sorted(tables.rows)]
        return [facts for facts in found if _matches(facts, criteria)][: criteria.limit]

    async def event(self, event_id: UUID) -> dict[str, Any]:
        tables = self._store.tables
        if event_id in tables.ids:
            return _facts(tables.rows[tables.ids[event_id]])
        if event_id in tables.archive:
            row, sent_at = tables.archive[event_id]
            return {**_facts(row), "state": State.SENT, "sent_at": sent_at}
        if event_id in tables.dead:
            return _dead_facts(tables.dead[event_id])
        raise NotFound(f"no event {event_id} in outbox, archive or dead letters; it may have been pruned or deleted")

    async def dead_letters(self, criteria: Criteria) -> list[dict[str, Any]]:
        dead = sorted(self._store.tables.dead.values(), key=lambda dead: dead.row.event.position)
        return [facts for facts in map(_dead_facts, dead) if _matches(facts, criteria)][: criteria.limit]

    async def dead_letter_groups(self, criteria: Criteria) -> list[dict[str, Any]]:
        every = replace(criteria, limit=len(self._store.tables.dead))
        counts = Counter((facts["reason"], facts["topic"]) for facts in await self.dead_letters(every))
        ranked = sorted(counts.items(), key=lambda group: (-group[1], group[0]))
        return [{"reason": reason, "topic": topic, "count": count} for (reason, topic), count in ranked][
            : criteria.limit
        ]

    async def has_due(self) -> bool:
        tables, now = self._store.tables, self._store.clock.now()
        if any(row.event.state in FETCHABLE for row in tables.rows.values()):
            return True
        return any(block.until is not None and block.until <= now for block in tables.blocked.values())

    async def topics(self, limit: int) -> list[str]:
        self._resolve_topics()
        return sorted({row.stream.topic for row in self._store.tables.rows.values()})[:limit]

    async def relays(self) -> int:
        now = self._store.clock.now()
        return sum(self._store.alive(relay, now) for relay in self._store.tables.relays)

    async def lane_owner(self, lane: int) -> str | None:
        tables, now = self._store.tables, self._store.clock.now()
        owner = tables.lanes[lane].owner if lane in tables.lanes else None
        return owner if owner is not None and self._store.alive(owner, now) else None

    async def blocked_streams(self, limit: int) -> list[BlockedStream]:
        tables = self._store.tables
        blocked = sorted(tables.blocked.items(), key=lambda entry: entry[1].cause is not BlockReason.DEAD_LETTER)
        return [
            BlockedStream(stream, block.cause, block.until, len(tables.waiting.get(stream, ())))
            for stream, block in blocked[:limit]
        ]

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        chosen = self._chosen(event_ids)
        for dead in chosen:
            self._resume(dead) if dead.policy == OnDeadLetter.BLOCK else self._stage_again(dead)
        self._record("replay", actor, chosen)
        return len(chosen)

    async def dead_letter(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        self._resolve_topics()
        tables = self._store.tables
        row = tables.rows.get(tables.ids.get(event_id, -1))
        if row is None or row.event.state not in model.guard("dead_letter") or row.event.state == State.OPTIMISTIC:
            return False
        self._park_before(row)
        self._store.take_lane(row.event.lane, None)
        settling = MemorySettlement(self._store)
        settling.dead_letter(
            row, DeadLettered(DeadLetterReason.BY_HAND, failure, OnDeadLetter(policy)), attempts=row.event.attempts
        )
        settling.streams()
        self._store.commands.write(actor, "dead_letter", [(event_id, None)], policy=policy)
        return True

    def _resolve_topics(self) -> None:
        for row in self._store.tables.rows.values():
            self._store.resolve_topic(row)

    def _park_before(self, row: OutboxTableRow) -> None:
        """Park earlier events of the stream as well; otherwise the relay would publish the skip marker before them."""
        event, rows = row.event, self._store.tables.rows
        stream = [other.event for other in rows.values() if other.stream == row.stream]
        before = [other for other in stream if other.position < event.position]
        if any(earlier.state == State.OPTIMISTIC for earlier in before):
            raise Transient("an earlier event of its stream is being sent by its writer; try again in a few seconds")
        for earlier in before:
            if earlier.state == State.PENDING:
                self._store.tables.transition(earlier.position, State.PARKED)

    async def edit(self, event_id: UUID, actor: str, edit: DeadLetterEdit) -> bool:
        tables = self._store.tables
        dead = tables.dead.get(event_id)
        if dead is None:
            return False
        row, stream = dead.row, dead.row.stream
        moved = edit.topic not in (None, stream.topic)
        changes = edit.changes(row.event.payload, stream.topic)
        if moved and dead.policy == OnDeadLetter.BLOCK and (marker := skipped_marker(row)):
            marker.event = marker.event._replace(state=State.PARKED)
            self._store.insert(marker)
        event = row.event._replace(
            payload=row.event.payload if edit.payload is None else edit.payload.encode(),
            headers=edit.headers_over(row.event.headers, moved=moved).encode(),
        )
        row.event = event
        if moved and edit.topic:
            row.event = event._replace(topic=edit.topic, sequence=None)
            row.stream = Stream(stream.lane, edit.topic, stream.key)
            dead.policy = OnDeadLetter.SKIP
            self._unblock(stream)
        self._store.commands.write(actor, "edit", [(event_id, None)], **changes)
        return True

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        chosen = self._chosen(event_ids)
        for dead in chosen:
            del self._store.tables.dead[dead.row.event.event_id]
            if dead.policy == OnDeadLetter.BLOCK and (marker := skipped_marker(dead.row)):
                marker.event = marker.event._replace(state=State.PARKED)
                self._store.insert(marker)
            self._unblock(dead.row.stream)
            add(self._store, JournalKind.DISCARDED, [dead.row.event.event_id])
        self._record("discard", actor, chosen)
        return len(chosen)

    def _chosen(self, event_ids: Sequence[UUID]) -> list[DeadRow]:
        dead = self._store.tables.dead
        return sorted((dead[i] for i in set(event_ids) if i in dead), key=lambda found: found.row.event.position)

    def _resume(self, dead: DeadRow) -> None:
        row, tables = dead.row, self._store.tables
        del tables.dead[row.event.event_id]
        row.event = row.event._replace(state=State.PARKED, attempts=0, suspect=False)
        self._store.insert(row)
        self._unblock(row.stream)

    def _stage_again(self, dead: DeadRow) -> None:
        row, tables = dead.row, self._store.tables
        del tables.dead[row.event.event_id]
        headers = json.dumps({**json.loads(row.event.headers), "replayed": "true"}).encode()
        row.event = row.event._replace(
            position=self._store.next_position(), state=State.PENDING, attempts=0, suspect=False, headers=headers
        )
        self._store.insert(row)

    def _unblock(self, stream: Stream) -> None:
        """Drain a blocked stream after its last blocking dead letter. Only the owner of the lane removes the row."""
        tables = self._store.tables
        blocked = any(dead.row.stream == stream and dead.policy == OnDeadLetter.BLOCK for dead in tables.dead.values())
        if not blocked and stream in tables.blocked and tables.blocked[stream].cause is BlockReason.DEAD_LETTER:
            tables.blocked[stream] = BlockRow(BlockReason.DRAINING, None, self._store.clock.now())

    def _record(self, verb: str, actor: str, chosen: Sequence[DeadRow]) -> None:
        self._store.commands.write(actor, verb, [(dead.row.event.event_id, None) for dead in chosen])


def _facts(row: OutboxTableRow) -> dict[str, Any]:
    event = row.event
    facts = event._asdict()
    for name in ("readiness", "suspect"):
        del facts[name]
    facts["payload"], facts["headers"] = json.loads(event.payload), json.loads(event.headers)
    facts["retry"] = json.loads(event.retry) if event.retry else None
    return {**facts, "topic": row.stream.topic, "priority": row.priority, "failure": row.failure}


def _dead_facts(dead: DeadRow) -> dict[str, Any]:
    extra = {"reason": dead.reason, "policy": dead.policy, "dead_lettered_at": dead.dead_lettered_at}
    return {**_facts(dead.row), "state": State.DEAD_LETTER, **extra}


def _matches(facts: dict[str, Any], criteria: Criteria) -> bool:
    if criteria.event_ids and facts["event_id"] not in criteria.event_ids:
        return False
    wanted = ("state", "event_type", "topic", "key", "reason")
    return all(getattr(criteria, name) in (None, facts.get(name)) for name in wanted)
