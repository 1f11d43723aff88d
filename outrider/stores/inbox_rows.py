"""What the SQL stores share about inboxes: deliveries as columns, and conclusions sorted by what is written for them.

Anybody may have sent a delivery, so what a column cannot hold is kept in a form that it can: nothing here may fail.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from outrider.delivery import Arrival, Delivery, InboxStream
from outrider.errors import UnfitHandler
from outrider.inbox_store import Applied, Buried, Cause, Conclusion, Entry, Stalled, Standing, Waits
from outrider.stores.lending import ENDED

TOPIC_BYTES_MAX = 400


def clean(text: str) -> str:
    r"""Return a text that every database takes: without NUL, and valid as UTF-8.

    >>> clean("a\0b")
    'a\\0b'
    """
    if "\0" in text:
        text = text.replace("\0", "\\0")
    return text if text.isascii() else text.encode(errors="replace").decode()


def place_of(stream: InboxStream) -> InboxStream:
    """Return a stream as its row names it. Only a topic that could not be read is named differently.

    >>> place_of(InboxStream("orders", "A-1"))
    InboxStream(topic='orders', key='A-1', band=1)
    """
    topic = clean(stream.topic)
    if len(topic) > TOPIC_BYTES_MAX or not topic.isascii():
        topic = topic.encode()[:TOPIC_BYTES_MAX].decode(errors="ignore")
    return stream if topic == stream.topic else stream._replace(topic=topic)


def headers_text(headers: Mapping[str, bytes]) -> str:
    """Return headers as JSON that holds any bytes and any name.

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


class WaitingRow(NamedTuple):
    """An arrival as the columns of those that wait."""

    event_id: UUID
    event_type: str
    topic: str
    key: str
    band: int
    sequence: int | None
    raw_key: bytes | None
    headers: str
    body: bytes
    shard: str
    place: str
    replayed: bool

    @classmethod
    def of(cls, arrival: Arrival) -> WaitingRow:
        _, raw_key, body, headers, shard, place, _ = arrival.delivery
        return cls(
            arrival.event_id,
            arrival.event_type,
            *place_of(arrival.stream),
            arrival.sequence,
            raw_key,
            headers_text(headers),
            body,
            clean(shard),
            clean(place),
            arrival.replayed,
        )


def delivery_of(columns: Sequence[Any]) -> Delivery:
    """Return a delivery from its columns: topic, raw key, body, headers, shard, place."""
    topic, raw_key, body, headers, shard, place = columns
    return Delivery(topic, raw_key, body, headers_of(headers), shard, place)


def standing_of(seen: int | None, cause: str | None, waiting: int) -> Standing:
    """Return where a stream stands from its columns."""
    return Standing(seen, Cause(cause) if cause else None, waiting)


@dataclass(slots=True)
class Sheet:
    """Fresh arrivals by what is written for them.

    `withdrawn` lose their receipts, `parked` get a row of those that wait, `left` lose theirs. Dead letters are parked
    first, and buried from there. `added` is by how many the waiting events of a stream become more.
    """

    seconds: dict[UUID, float] = field(default_factory=dict)
    withdrawn: list[UUID] = field(default_factory=list)
    parked: list[Arrival] = field(default_factory=list)
    left: list[UUID] = field(default_factory=list)
    buried: list[tuple[Arrival, Buried]] = field(default_factory=list)
    added: Counter[InboxStream] = field(default_factory=Counter)

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Sheet:
        sheet = cls()
        for arrival, conclusion in entries:
            if isinstance(conclusion, Waits | Stalled):
                sheet.withdrawn.append(arrival.event_id)
            if isinstance(conclusion, Applied):
                sheet.seconds[arrival.event_id] = conclusion.seconds
            if isinstance(conclusion, Buried):
                sheet.buried.append((arrival, conclusion))
            if arrival.waiting_id is None:
                sheet._come(arrival, conclusion)
            elif not isinstance(conclusion, Waits):
                sheet._go(arrival, conclusion)
        return sheet

    def _come(self, arrival: Arrival, conclusion: Conclusion) -> None:
        if isinstance(conclusion, Waits | Buried):
            self.parked.append(arrival)
        if isinstance(conclusion, Waits):
            self.added[arrival.stream] += 1

    def _go(self, arrival: Arrival, conclusion: Conclusion) -> None:
        self.added[arrival.stream] -= 1
        if not isinstance(conclusion, Buried):
            self.left.append(arrival.event_id)


def only_applied(entries: Sequence[Entry]) -> bool:
    """Tell whether nothing happened but what nearly always does: delivered, and applied."""
    return all(type(entry.conclusion) is Applied and entry.arrival.waiting_id is None for entry in entries)


def may_go(cause: Cause | None, *, early: bool) -> bool:
    """Tell whether the waiting events of a stream may go, by why they wait.

    >>> may_go(Cause.EARLY, early=False)
    False
    """
    return cause is Cause.DRAINING or (early and cause is Cause.EARLY)


def check_receipts(found: int, count: int) -> None:
    """Refuse to go on without the receipts that the transaction began with: the effects would be repeated.

    >>> check_receipts(1, 1)
    """
    if found != count:
        raise UnfitHandler(ENDED)


def failure_text(failure: Mapping[str, Any]) -> str:
    """Return a failure as JSON; what is not JSON becomes text."""
    return json.dumps(failure, default=str)
