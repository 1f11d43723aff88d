"""Code that the SQL stores share for inbox and sagas: rows of received events, and outcomes grouped by write.

Any sender may have produced a delivery. A value that a column cannot hold is stored in a changed form, so no conversion
here may fail.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from outrider.audit_chain import AuditAnchor, AuditHead, AuditLine, close_anchor, first_hash, seal
from outrider.errors import InvalidHandler
from outrider.event import Delivery, InboxStream, ReceivedEvent, subject_hash
from outrider.handler_transactions import TRANSACTION_ENDED
from outrider.inbox.model import (
    Applied,
    EventOutcome,
    Held,
    InboxBlockReason,
    InboxDeadLettered,
    InboxOutcome,
    LeftWithBroker,
    StreamState,
)
from outrider.saga.model import (
    Instance,
    JournalEntry,
    MessageKind,
    Phase,
    SagaChange,
    SagaMessage,
    Status,
    StepStatus,
    Uncertainty,
    Undelivered,
)

TOPIC_BYTES_MAX = 400

AUDIT_FACTS = ("at", "old_status", "new_status", "step", "what", "actor", "detail", "traceparent")

T = TypeVar("T")


def clean(text: str) -> str:
    r"""Return a text that every database accepts: without NUL, and valid as UTF-8.

    >>> clean("a\0b")
    'a\\0b'
    """
    if "\0" in text:
        text = text.replace("\0", "\\0")
    return text if text.isascii() else text.encode(errors="replace").decode()


def stream_key_of(stream: InboxStream) -> InboxStream:
    """Return a stream under the name of its row. Only an unreadable topic has a different name.

    >>> stream_key_of(InboxStream("orders", "A-1"))
    InboxStream(topic='orders', key='A-1', band=1)
    """
    topic = clean(stream.topic)
    if len(topic) > TOPIC_BYTES_MAX or not topic.isascii():
        topic = topic.encode()[:TOPIC_BYTES_MAX].decode(errors="ignore")
    return stream if topic == stream.topic else stream._replace(topic=topic)


def headers_text(headers: Mapping[str, bytes]) -> str:
    """Return headers as JSON, for any bytes and any name.

    >>> headers_text({"trace": b"abc"})
    '{"trace": "YWJj"}'
    """
    return json.dumps({name: b64encode(value).decode() for name, value in headers.items()})


def headers_of(text: str) -> dict[str, bytes]:
    """Return headers from their JSON.

    >>> headers_of('{"trace": "YWJj"}')
    {'trace': b'abc'}
    """
    return {name: b64decode(value) for name, value in json.loads(text).items()}


class HeldRow(NamedTuple):
    """A received event as the columns of a held event."""

    event_id: UUID
    event_type: str
    topic: str
    key: str
    band: int
    sequence: int | None
    raw_key: bytes | None
    headers: str
    body: bytes
    partition: str
    position: str
    replayed: bool

    @classmethod
    def of(cls, received: ReceivedEvent) -> HeldRow:
        _, raw_key, body, headers, partition, position, _ = received.delivery
        return cls(
            received.event_id,
            received.event_type,
            *stream_key_of(received.stream),
            received.sequence,
            raw_key,
            headers_text(headers),
            body,
            clean(partition),
            clean(position),
            received.replayed,
        )


def delivery_of(columns: Sequence[Any]) -> Delivery:
    """Return a delivery from its columns: topic, raw key, body, headers, partition, position."""
    topic, raw_key, body, headers, partition, position = columns
    return Delivery(topic, raw_key, body, headers_of(headers), partition, position)


def state_of(seen: int | None, cause: str | None, waiting: int) -> StreamState:
    """Return a stream state from its columns."""
    return StreamState(seen, InboxBlockReason(cause) if cause else None, waiting)


@dataclass(slots=True)
class InboxWriteSet:
    """New received events, grouped by the writes for them.

    `withdrawn` events lose their receipts, `parked` events get a row as held events, and `left` events lose that row.
    Dead letters are parked first and then moved to the dead letters. `added` is the change in the number of held events
    of a stream.
    """

    seconds: dict[UUID, float] = field(default_factory=dict)
    withdrawn: list[UUID] = field(default_factory=list)
    parked: list[ReceivedEvent] = field(default_factory=list)
    left: list[UUID] = field(default_factory=list)
    dead_letter: list[tuple[ReceivedEvent, InboxDeadLettered]] = field(default_factory=list)
    added: Counter[InboxStream] = field(default_factory=Counter)

    @classmethod
    def of(cls, entries: Sequence[EventOutcome]) -> InboxWriteSet:
        writes = cls()
        for received, outcome in entries:
            if isinstance(outcome, Held | LeftWithBroker):
                writes.withdrawn.append(received.event_id)
            if isinstance(outcome, Applied):
                writes.seconds[received.event_id] = outcome.seconds
            if isinstance(outcome, InboxDeadLettered):
                writes.dead_letter.append((received, outcome))
            if received.waiting_id is None:
                writes._received(received, outcome)
            elif not isinstance(outcome, Held):
                writes._left(received, outcome)
        return writes

    def _received(self, received: ReceivedEvent, outcome: InboxOutcome) -> None:
        if isinstance(outcome, Held | InboxDeadLettered):
            self.parked.append(received)
        if isinstance(outcome, Held):
            self.added[received.stream] += 1

    def _left(self, received: ReceivedEvent, outcome: InboxOutcome) -> None:
        self.added[received.stream] -= 1
        if not isinstance(outcome, InboxDeadLettered):
            self.left.append(received.event_id)


def only_applied(entries: Sequence[EventOutcome]) -> bool:
    """Return whether all outcomes are the common case: delivered, and applied."""
    return all(type(entry.outcome) is Applied and entry.received.waiting_id is None for entry in entries)


def can_drain(cause: InboxBlockReason | None, *, early: bool) -> bool:
    """Return whether the held events of a stream may be handled, given the reason of the block.

    >>> can_drain(InboxBlockReason.EARLY, early=False)
    False
    """
    return cause is InboxBlockReason.DRAINING or (early and cause is InboxBlockReason.EARLY)


def check_receipts(found: int, count: int) -> None:
    """Reject a commit without the receipts from the start of the transaction: the effects would be repeated.

    >>> check_receipts(1, 1)
    """
    if found != count:
        raise InvalidHandler(TRANSACTION_ENDED)


def failure_text(failure: Mapping[str, Any]) -> str:
    """Return a failure as JSON. Other values become text."""
    return json.dumps(failure, default=str)


def instance_of(row: Sequence[Any]) -> Instance:
    """Return an instance from its columns, in the order of its fields; the state as text."""
    saga_id, saga_type, version, correlation_id, state, status, *rest = row
    return Instance(saga_id, saga_type, version, correlation_id, state.encode(), Status(status), *rest)


def entry_of(row: Sequence[Any]) -> JournalEntry:
    """Return a journal entry from its columns, in the order of its fields."""
    step, phase, status, *progress, uncertainty, undelivered, command_id, reply_id, since, data = row
    columns = (
        Phase(phase),
        StepStatus(status),
        *progress,
        Uncertainty(uncertainty) if uncertainty else None,
        Undelivered(undelivered) if undelivered else None,
        command_id,
        reply_id,
        since,
        data,
    )
    return JournalEntry(step, *columns)


def message_of(row: Sequence[Any]) -> SagaMessage:
    """Return a saga message from its columns, in the order of its fields; the body as text."""
    message_id, kind, name, key, body, *rest = row
    return SagaMessage(message_id, MessageKind(kind), name, key, body.encode(), *rest)


def in_turn(*lines: Sequence[T]) -> list[T]:
    """Merge several lists in alternation, without duplicates.

    >>> in_turn("abc", "xbyz")
    ['a', 'x', 'b', 'c', 'y', 'z']
    """
    rounds = zip_longest(*([(member,) for member in line] for line in lines), fillvalue=())
    return list(dict.fromkeys(member for together in rounds for found in together for member in found))


class SagaWriteSet(NamedTuple):
    """The writes of a turn: each journal entry once, and each message either consumed or seen.

    A release ends the losses in a row.
    """

    instance: Instance
    last_error: str | None
    entries: list[JournalEntry]
    taken: list[int]
    seen: list[int]
    lines: list[AuditLine]
    """The new lines of the audit chain."""
    due_seconds: float | None
    """The time from now until the saga is due or the claim ends."""

    @classmethod
    def of(cls, turn: SagaChange, lease_seconds: float) -> SagaWriteSet:
        last = {(e.step, e.phase): replace(e, error=_cleaned(e.error)) if e.error else e for e in turn.entries}
        taken = set(turn.taken)
        lines = _audit_lines(turn)
        to = replace(turn.instance, losses=0) if turn.release else turn.instance
        if lines:
            to = replace(to, audit_lines=lines[-1].line, audit_hash=lines[-1].hash)
        return cls(
            to,
            _cleaned(turn.instance.last_error),
            list(last.values()),
            sorted(taken),
            sorted(set(turn.seen) - taken),
            lines,
            turn.wake_seconds if turn.release else lease_seconds,
        )


def entry_row(entry: JournalEntry) -> tuple[Any, ...]:
    """Return a journal entry as columns, in the order of its fields."""
    return (
        *(entry.step, entry.phase, entry.status, entry.position, entry.attempts, entry.due_at, entry.error),
        *(entry.started_at, entry.ended_at, entry.uncertainty, entry.undelivered),
        *(entry.command_event_id, entry.reply_event_id, entry.unavailable_since, entry.data),
    )


def _audit_lines(turn: SagaChange) -> list[AuditLine]:
    if not turn.notes:
        return []
    to = turn.instance
    lines = [
        # Operators choose their own names, and a name may contain any character of a terminal.
        AuditLine(
            to.saga_id,
            place=0,
            line=number,
            at=turn.at or to.updated_at,
            old_status=note.old_status and note.old_status.value,
            new_status=note.new_status.value,
            step=note.step,
            what=clean(note.what),
            actor=clean(note.actor),
            detail=clean(note.detail),
            traceparent=to.traceparent,
        )
        for number, note in enumerate(turn.notes, to.audit_lines + 1)
    ]
    return seal(lines, to.audit_head, to.state, keep_state=turn.keep_state)


def head_of(instance: Instance, place: int | None = None) -> AuditHead:
    """Return the head of the audit chain of a saga, with the hash of the subject for a later erasure."""
    hash = subject_hash(instance.subject) if instance.subject else None
    return AuditHead(instance.saga_id, instance.audit_lines, instance.audit_head, place=place, subject_hash=hash)


def head_of_row(row: Sequence[Any]) -> AuditHead:
    """Return a head from its columns, followed by time and trace of a start for a chain of one line."""
    saga_id, lines, hash, anchor, place, started_at, traceparent = row
    return AuditHead(saga_id, lines, hash or first_hash(saga_id, started_at, traceparent), anchor, place)


def close_sagas(
    last: AuditAnchor | None, closed: Sequence[tuple[Instance, int | None]], now: datetime
) -> tuple[AuditAnchor, list[AuditHead]]:
    """Return the anchor and the heads of sagas that are removed together; each with the place of its last line."""
    heads = [head_of(instance, place) for instance, place in closed]
    return close_anchor(last, heads, now, max(instance.updated_at for instance, _ in closed)), heads


def _cleaned(text: str | None) -> str | None:
    return None if text is None else clean(text)
