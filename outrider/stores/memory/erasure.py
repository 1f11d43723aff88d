"""Erasure of subjects in memory, for tests."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from outrider.audit_chain import AuditLine, digest_of
from outrider.event import ERASED_FAILURE, ERASED_TEXT, ReceivedEvent
from outrider.privacy.erasure_store import (
    Blocker,
    Blocking,
    ErasurePlace,
    ErasureRun,
    Replacement,
    Runs,
    SubjectPage,
    SubjectRow,
    add_counts,
)
from outrider.privacy.keys import subject_key_ids
from outrider.stores.erasure_rows import by_run, counted, hashes_of, open_counts, subject_of
from outrider.stores.memory.inbox import MemoryInbox
from outrider.stores.memory.outbox import MemoryStore
from outrider.stores.memory.tables import DEAF, SagaRow
from outrider.stores.rows import headers_of, headers_text
from outrider.wire import decode


class MemoryErasure:
    """All rows of subjects in a memory store and its inbox."""

    def __init__(self, store: MemoryStore, inbox: MemoryInbox) -> None:
        self._store, self._inbox, self.log = store, inbox.tables, list[ErasureRun]()

    async def runs(self, hashes: Collection[str]) -> list[ErasureRun]:
        return [run for run in self.log if run.subject_hash in hashes]

    async def open_run(self, hash: str, actor: str) -> ErasureRun:
        if not any(run.finished_at is None for run in await self.runs([hash])):
            self.log.append(ErasureRun(len(self.log), hash, actor, self._store.clock.now(), None, {}, None))
        return (await self.runs([hash]))[-1]

    async def finish_run(self, run_id: Any, receipt: Mapping[str, Any]) -> bool:
        if self.log[run_id].finished_at is not None:
            return False
        known = json.loads(json.dumps(receipt))
        self.log[run_id] = self.log[run_id]._replace(finished_at=self._store.clock.now(), receipt=known)
        return True

    async def blocking(self, subjects: Collection[str], limit: int) -> list[Blocking]:
        tables, inbox = self._store.tables, self._inbox
        events = [
            Blocking(Blocker.EVENT, row.event.event_id, row.event.event_type, f"{row.stream.topic} {row.stream.key}")
            for row in tables.rows.values()
            if subject_of(row.event.headers.decode(), subjects, Blocker.EVENT)
        ]
        dead = [
            Blocking(Blocker.DEAD_LETTER, event_id, each.row.event.event_type, each.row.stream.topic)
            for event_id, each in tables.dead.items()
            if each.policy == "block" and subject_of(each.row.event.headers.decode(), subjects, Blocker.DEAD_LETTER)
        ]
        held = [
            Blocking(Blocker.HELD_EVENT, each.event_id, each.event_type, each.delivery.topic, consumer, _headers(each))
            for consumer, each in inbox.waiting.values()
            if subject_of(_headers(each), subjects, Blocker.HELD_EVENT)
        ]
        letters = [
            Blocking(Blocker.CONSUMER_DEAD_LETTER, number, each.received.event_type, each.consumer)
            for number, each in inbox.dead.items()
            if each.outcome.policy == "block"
            and subject_of(_headers(each.received), subjects, Blocker.CONSUMER_DEAD_LETTER)
        ]
        sagas = [
            Blocking(Blocker.SAGA, saga.saga_id, saga.saga_type, saga.status.value)
            for row, saga in self._store.sagas.living()
            if saga.subject in subjects and (row.listens or self._has_living_parent(saga.parent_id))
        ]
        return [each for found in (events, dead, held, letters, sagas) for each in found[:limit]]

    def _has_living_parent(self, parent_id: UUID | None) -> bool:
        return parent_id is not None and self._store.sagas.sagas.rows.get(parent_id, SagaRow()).listens

    async def skip_held(self, row: Blocking, headers: str, actor: str) -> bool:
        for number, (consumer, received) in self._inbox.waiting.items():
            if (consumer, received.event_id) == (row.consumer, row.id):
                self._inbox.waiting[number] = (consumer, _changed(received, headers, b"null"))
                self._store.commands.write(actor, "inbox_skip", [(row.id, consumer)])
                return True
        return False

    async def count(self, run_id: Any, place: str, count: int) -> None:
        self._save(run_id, add_counts(self._counts(run_id), {place: count}))

    async def page(self, place: ErasurePlace, subjects: Collection[str], after: Any) -> SubjectPage:
        return SubjectPage([row for row in self._rows(place, subjects) if row.subject in subjects], None, 1.0)

    def _rows(self, place: ErasurePlace, subjects: Collection[str]) -> list[SubjectRow]:
        tables = self._store.tables
        if place is ErasurePlace.SAGA:
            ended = ((saga.saga_id, saga) for _, saga in self._store.sagas.living() if saga.status in DEAF)
            return [SubjectRow((saga_id,), saga.subject or "", saga.saga_type) for saga_id, saga in ended]
        if place is ErasurePlace.REMOVED_SAGA:
            names = hashes_of(subjects)
            heads = {head.saga_id: names.get(head.subject_hash or "", "") for head in self._store.sagas.heads}
            return [SubjectRow((saga_id,), name, "") for saga_id, name in heads.items() if self._details(saga_id)]
        if place is ErasurePlace.CONSUMER_DEAD_LETTER:
            letters = ((n, each.received) for n, each in self._inbox.dead.items() if each.outcome.policy != "block")
            found: list[tuple[Any, ...]] = [((n,), each.event_type, _headers(each), False) for n, each in letters]
        else:
            kept = {event_id: row for event_id, (row, _) in tables.archive.items()}
            if place is ErasurePlace.DEAD_LETTER:
                kept = {event_id: each.row for event_id, each in tables.dead.items() if each.policy != "block"}
            found = [((event_id,), *_facts(row.event)) for event_id, row in kept.items()]
        return [
            SubjectRow(key, subject_of(headers, subjects, place) or "", name, headers, sealed)
            for key, name, headers, sealed in found
        ]

    async def erase_events(self, place: ErasurePlace, rows: Sequence[Replacement], runs: Runs) -> int:
        for run_id, group in by_run(rows, runs).items():
            counts = self._counts(run_id)
            for each in group:
                self._erase(place, each)
                self._erase_replies(each.saga_key)
            self._save(run_id, counted(counts, place, group))
        return len(rows)

    def _erase(self, place: ErasurePlace, each: Replacement) -> None:
        [key], tables = each.row.key, self._store.tables
        if place is ErasurePlace.CONSUMER_DEAD_LETTER:
            letter = self._inbox.dead[key]
            outcome = replace(letter.outcome, failure=json.loads(ERASED_FAILURE))
            received = _changed(letter.received, each.headers, ERASED_TEXT.encode())
            self._inbox.dead[key] = replace(letter, received=received, outcome=outcome)
            return
        row = tables.dead[key].row if place is ErasurePlace.DEAD_LETTER else tables.archive[key][0]
        row.event = row.event._replace(payload=ERASED_TEXT.encode(), headers=each.headers.encode())
        row.failure = json.loads(ERASED_FAILURE) if place is ErasurePlace.DEAD_LETTER else None

    async def erase_saga(self, place: ErasurePlace, row: SubjectRow, run_id: Any) -> bool:
        [saga_id], counts, sagas = row.key, self._counts(run_id), self._store.sagas
        stored = sagas.sagas.rows[saga_id]
        if place is ErasurePlace.SAGA and stored.instance:
            for (step, _), entry in list(stored.journal.items()):
                self._erase_replies(f"{saga_id}:{step}")
                stored.journal[step, entry.phase] = replace(entry, error=None, data=None)
            erased = ERASED_TEXT.encode()
            stored.messages = {n: each._replace(body=erased) for n, each in stored.messages.items()}
            stored.instance = replace(stored.instance, state=erased, last_error=None, subject=None)
        removed: dict[str, Any] = {"detail": "", "state": None, "state_hash": None, "salt": None}
        stored.audit = [
            line._replace(**removed, digest=digest_of(line)) if line.salt else line for line in stored.audit
        ]
        self._save(run_id, add_counts(counts, {place: 1}))
        return True

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    def _details(self, saga_id: UUID) -> list[AuditLine]:
        return [line for line in self._store.sagas.sagas.rows.get(saga_id, SagaRow()).audit if line.salt]

    def _erase_replies(self, saga_key: str | None) -> None:
        for (_, key), passages in self._store.sagas.participants.rows.items():
            for phase, passage in passages.items():
                if key == saga_key and passage.reply is not None:
                    rejection = json.loads(passage.reply).get("rejection", False)
                    text = json.dumps({"rejection": rejection, **json.loads(ERASED_TEXT)})
                    passages[phase] = passage._replace(reply=text.encode())

    def _counts(self, run_id: Any) -> str:
        run = self.log[run_id]
        return open_counts(json.dumps(run.counts) if run.finished_at is None else None)

    def _save(self, run_id: Any, counts: str) -> None:
        self.log[run_id] = self.log[run_id]._replace(counts=json.loads(counts))


def _headers(received: ReceivedEvent) -> str:
    return headers_text(received.delivery.headers)


def _facts(event: Any) -> tuple[str, str, bool]:
    return event.event_type, event.headers.decode(), bool(subject_key_ids(event.payload))


def _changed(received: ReceivedEvent, headers: str, body: bytes) -> ReceivedEvent:
    """Return a received event with another delivery, at its place."""
    delivery = received.delivery._replace(headers=headers_of(headers), body=body)
    return decode(delivery)._replace(waiting_id=received.waiting_id, replayed=received.replayed)
