"""What people do with a consumer's trouble, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outrider.delivery import InboxStream
from outrider.inbox_store import Cause, InboxCriteria, Standing
from outrider.outcome import Policy
from outrider.stores.memory.inbox_tables import DeadArrival, InboxTables, StreamRow


class MemoryInboxDesk:
    """Listing, replaying and discarding."""

    def __init__(self, tables: InboxTables, now: Callable[[], datetime]) -> None:
        self._tables, self._now = tables, now

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        mine = [row for (name, _), row in self._tables.streams.items() if consumer in (None, name)]
        return {
            "waiting": sum(row.standing.waiting for row in mine),
            "blocked_streams": sum(row.standing.cause is not None for row in mine),
            "dead_letters": sum(consumer in (None, letter.consumer) for letter in self._tables.dead.values()),
        }

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        found = ((event_id, self._tables.receipts.get((consumer, event_id))) for event_id in event_ids)
        return [
            {
                "event_id": event_id,
                "event_type": receipt.arrival.event_type,
                "topic": receipt.arrival.stream.topic,
                "key": receipt.arrival.stream.key,
                "sequence": receipt.arrival.sequence,
                "received_at": receipt.received_at,
                "processing_seconds": receipt.seconds,
            }
            for event_id, receipt in found
            if receipt
        ]

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        found = (
            _facts(number, letter) for number, letter in sorted(self._tables.dead.items()) if number in criteria.ids
        )
        if not criteria.ids:
            found = (_facts(number, letter) for number, letter in sorted(self._tables.dead.items()))
        wanted = {name: getattr(criteria, name) for name in ("consumer", "topic", "key", "reason")}
        given = {name: value for name, value in wanted.items() if value is not None}
        return [facts for facts in found if given.items() <= facts.items()][: criteria.limit]

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        found = [
            {"consumer": name, **stream._asdict(), **row.standing._asdict(), "since": row.since}
            for (name, stream), row in self._tables.streams.items()
            if consumer in (None, name) and row.standing.cause
        ]
        return sorted(found, key=lambda facts: (facts["cause"] != Cause.HELD, facts["since"]))[:limit]

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        letters = self._take(ids)
        for number, letter in letters:
            arrival = letter.arrival._replace(waiting_id=number)
            if letter.conclusion.policy is Policy.SKIP:
                arrival = arrival._replace(replayed=True)
            self._tables.waiting[number] = (letter.consumer, arrival)
            self._tables.receipts.pop((letter.consumer, arrival.event_id), None)
            self._go_on(letter, added=1, seen=None)
        return len(letters)

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        letters = self._take(ids)
        for _, letter in letters:
            if letter.conclusion.policy is Policy.HOLD:
                self._go_on(letter, added=0, seen=letter.arrival.sequence)
        return len(letters)

    async def release(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        row = self._tables.streams.get((consumer, stream))
        if row is None or row.standing.cause is not Cause.EARLY:
            return False
        first = self._tables.waiting_of(consumer, stream, by_sequence=True)[0].sequence
        assert first is not None
        self._stand(consumer, stream, row.standing._replace(seen=first - 1, cause=Cause.DRAINING))
        return True

    def _take(self, ids: Sequence[int]) -> list[tuple[int, DeadArrival]]:
        return [(number, self._tables.dead.pop(number)) for number in sorted(set(ids)) if number in self._tables.dead]

    def _go_on(self, letter: DeadArrival, *, added: int, seen: int | None) -> None:
        """Let the stream drain, unless another dead letter holds it."""
        stream = letter.arrival.stream
        known = self._tables.streams.get((letter.consumer, stream))
        at = known.standing if known else Standing()
        if seen is not None and at.seen is not None:
            at = at._replace(seen=max(at.seen, seen))
        held = any(
            other.consumer == letter.consumer
            and other.arrival.stream == stream
            and other.conclusion.policy is Policy.HOLD
            for other in self._tables.dead.values()
        )
        at = at._replace(waiting=at.waiting + added)
        self._stand(letter.consumer, stream, at._replace(cause=_cause(held, at.waiting)))

    def _stand(self, consumer: str, stream: InboxStream, standing: Standing) -> None:
        if standing == Standing():
            self._tables.streams.pop((consumer, stream), None)
        else:
            self._tables.streams[consumer, stream] = StreamRow(standing, self._now())


def _cause(held: bool, waiting: int) -> Cause | None:
    if held:
        return Cause.HELD
    return Cause.DRAINING if waiting else None


def _facts(number: int, letter: DeadArrival) -> dict[str, Any]:
    arrival = letter.arrival
    return {
        "id": number,
        "consumer": letter.consumer,
        "event_id": arrival.event_id,
        "event_type": arrival.event_type,
        "topic": arrival.delivery.topic,
        "key": arrival.stream.key,
        "sequence": arrival.sequence,
        "place": arrival.delivery.place,
        "headers": dict(arrival.delivery.headers),
        "body": arrival.delivery.body,
        "reason": letter.conclusion.reason,
        "failure": letter.conclusion.failure,
        "policy": letter.conclusion.policy,
        "attempts": letter.conclusion.attempts,
        "buried_at": letter.buried_at,
    }
