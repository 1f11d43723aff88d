"""What people do with events in PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outrider.errors import NotFound, Transient
from outrider.event import Stream
from outrider.lifecycle import State
from outrider.outcome import Bury, Policy, Reason
from outrider.store import Criteria, Held
from outrider.stores.postgres.settling import STALL_MS, Burial, Settling

if TYPE_CHECKING:
    from outrider.stores.postgres.store import PostgresStore

LOOK_PER_LANE, LOOK_MAX = 100, 10_000
"""How many events of a lane, and how many blocked streams, are looked at for their topics."""

_JSON = ("payload", "headers", "retry", "failure")


class PostgresDesk:
    """Listing, replaying, burying and discarding."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def counts(self, *, sent: bool = True) -> dict[str, int]:
        rows = await self._fetch("counts") + (await self._fetch("count_sent") if sent else [])
        return {row[0]: row[1] for row in rows}

    async def events(self, criteria: Criteria) -> list[dict[str, Any]]:
        verb = "sent" if criteria.state == State.SENT else "events"
        return [_facts(row) for row in await self._fetch(verb, *_filter(criteria))]

    async def event(self, event_id: UUID) -> dict[str, Any]:
        criteria = Criteria(event_ids=(event_id,))
        for verb, extra in (("events", ()), ("sent", ()), ("dead_letters", (None,))):
            if rows := await self._fetch(verb, *_filter(criteria), *extra):
                return _facts(rows[0])
        raise NotFound(f"no event {event_id} in outbox, archive or dead letters; it may have been pruned or deleted")

    async def dead_letters(self, criteria: Criteria) -> list[dict[str, Any]]:
        return [_facts(row) for row in await self._fetch("dead_letters", *_filter(criteria), criteria.reason)]

    async def topics(self, limit: int) -> list[str]:
        rows = await self._fetch("topics", LOOK_PER_LANE, LOOK_MAX)
        return sorted({self._store.rule(*row) for row in rows})[:limit]

    async def relays(self) -> int:
        [[alive]] = await self._fetch("alive")
        return int(alive)

    async def blocked_streams(self, limit: int) -> list[Held]:
        rows = await self._fetch("blocked_streams", limit)
        return [Held(Stream(*row[:3]), row["cause"], row["until"], row["waiting"]) for row in rows]

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        async with self._transaction() as conn:
            await conn.execute(self._store.sql["lock_streams"], list(event_ids))
            resumed = await conn.fetch(self._store.sql["resume"], list(event_ids))
            again = await conn.fetch(self._store.sql["stage_again"], list(event_ids))
            await self._let_go(conn, resumed)
            await self._record(conn, actor, "replay", [*resumed, *again])
        return len(resumed) + len(again)

    async def bury(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        async with self._transaction() as conn:
            row = await conn.fetchrow(self._store.sql["place_of"], event_id)
            if row is None:
                return False
            # The lane first, then the event again: whoever held the lane may have settled it in between.
            await conn.execute(self._store.sql["seize_lane"], row["lane"])
            topic = row["topic"] or self._store.rule(row["event_type"], None, row["routing_key"])
            stream, outcome = Stream(row["lane"], topic, row["key"]), Bury(Reason.BY_HAND, failure, Policy(policy))
            writing = Settling(self._store, conn)
            if await self._park_before(conn, stream, row["id"]):
                writing.parked.append(stream)
            buried = await writing.bury(
                [Burial(event_id, row["id"], stream, outcome, row["event_type"], row["sequence"])], spent=0
            )
            await writing.streams()
            await conn.execute(self._store.sql["record"], actor, "bury", [event_id] * buried)
            return buried > 0

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        """A transaction that cannot keep a lane from its relay for long, even if whoever opened it stands still."""
        async with self._store.database.transaction() as conn:
            await conn.execute(f"SET LOCAL idle_in_transaction_session_timeout = {STALL_MS}")
            yield conn

    async def _park_before(self, conn: Any, stream: Stream, position: int) -> int:
        """Let earlier events of the stream wait too, or what takes the buried one's place would go out before them."""
        rows = await conn.fetch(self._store.sql["pending_before"], stream.lane, stream.key, position)
        rule = self._store.rule
        mine = [row for row in rows if rule(row["event_type"], row["topic"], row["routing_key"]) == stream.topic]
        if any(row["state"] == State.OPTIMISTIC for row in mine):
            raise Transient("an earlier event of its stream is being sent by its writer; try again in a few seconds")
        ids = [row["event_id"] for row in mine]
        count = len(ids)
        return len(await conn.fetch(self._store.sql["wait"], ids, [stream.topic] * count, [State.PARKED] * count))

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        async with self._transaction() as conn:
            await conn.execute(self._store.sql["lock_streams"], list(event_ids))
            gone = await conn.fetch(self._store.sql["discard"], list(event_ids))
            await self._let_go(conn, gone)
            await self._record(conn, actor, "discard", gone)
        return len(gone)

    async def _let_go(self, conn: Any, rows: list[Any]) -> None:
        if rows:
            streams = [(row["lane"], row["topic"], row["stream_key"]) for row in rows]
            await conn.execute(self._store.sql["let_held_go"], *(list(column) for column in zip(*streams, strict=True)))

    async def _record(self, conn: Any, actor: str, verb: str, rows: list[Any]) -> None:
        await conn.execute(self._store.sql["record"], actor, verb, [row["event_id"] for row in rows])

    async def _fetch(self, verb: str, *args: Any) -> list[Any]:
        return await self._store.database.fetch(self._store.sql[verb], *args)


def _filter(criteria: Criteria) -> tuple[Any, ...]:
    ids = list(criteria.event_ids)
    return ids, criteria.state, criteria.event_type, criteria.topic, criteria.key, criteria.limit


def _facts(row: Any) -> dict[str, Any]:
    facts = dict(row)
    for name in _JSON:
        if facts.get(name) is not None:
            facts[name] = json.loads(facts[name])
    facts["key"] = facts.pop("stream_key", None) or facts["key"]
    facts["position"] = facts.pop("id")
    return facts
