"""One transaction of a consumer: receipts, gate, handlers, commit. Ack comes after, and is not done here.

A crash before the commit leaves no trace, and the broker delivers again. A crash after it leaves the receipt, and the
next delivery is recognised. There is no third case, because all of it is one transaction.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from outrider.codec.open import open_delivery
from outrider.delivery import Arrival, InboxStream
from outrider.errors import Misuse, OutriderError, Permanent, UnfitHandler
from outrider.inbox.calling import HandlerFailed, call, unfit
from outrider.inbox.gate import Decision, Refuse, decide, numbered
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import Gate
from outrider.inbox_store import (
    Applied,
    Buried,
    Cause,
    Conclusion,
    Dropped,
    Entry,
    InboxStore,
    Stalled,
    Standing,
    Waiting,
    Waits,
)
from outrider.outcome import Policy, Reason

NO_HANDLER = Dropped("no handler of its type")
HANDLED_BEFORE = Dropped("handled before")


class Taken(NamedTuple):
    """What a transaction starts from: arrivals, which of them are fresh, and where their streams stand."""

    arrivals: Sequence[Arrival]
    fresh: frozenset[UUID]
    standings: Mapping[InboxStream, Standing]


Take = Callable[[Any], Awaitable[Taken | None]]


@dataclass(slots=True)
class Turns:
    """What a committed transaction did."""

    entries: list[Entry] = field(default_factory=list)
    duplicates: list[Arrival] = field(default_factory=list)
    standings: dict[InboxStream, Standing] = field(default_factory=dict)
    dead_letters: Mapping[UUID, int] = field(default_factory=dict)
    drains: Collection[Cause] = (Cause.DRAINING,)

    def of(self, kind: type[Conclusion]) -> list[Entry]:
        """Return the entries with such a conclusion."""
        return [entry for entry in self.entries if isinstance(entry.conclusion, kind)]

    @property
    def draining(self) -> list[InboxStream]:
        """Return the streams whose waiting events may go now."""
        return [stream for stream, standing in self.standings.items() if standing.cause in self.drains]


async def commit(store: InboxStore, routes: Routes, take: Take, bury: Mapping[UUID, Buried] | None = None) -> Turns:
    """Take arrivals, let the handlers of those whose turn it is work, and commit.

    Those in `bury` go to the dead letters when their turn comes, instead of to their handlers.
    """
    turns = Turns(drains=routes.settings.drains)
    try:
        await _transact(store, routes, take, bury or {}, turns)
    except (Permanent, Misuse) as error:
        failed, applied = error.__cause__, turns.of(Applied)
        if isinstance(failed, HandlerFailed):
            raise await _blamed(store, routes, take, failed.arrival, error) from error
        if not applied:
            raise
        raise await _blamed(store, routes, take, applied[0].arrival, error) from error
    return turns


async def _blamed(
    store: InboxStore, routes: Routes, take: Take, arrival: Arrival, error: Permanent | Misuse
) -> OutriderError:
    """Say whose fault it is that a transaction was refused after its handlers had returned.

    What is permanent is theirs: a deferred constraint, or an error that one has swallowed. What the store calls misuse,
    such as missing rights, is theirs if all of it passes without them: one has changed its role, for instance.
    """
    if isinstance(error, UnfitHandler):
        route = routes.find(arrival.delivery.topic, arrival.event_type)
        return unfit(route, arrival, error) if route else error
    if isinstance(error, Misuse) and not await _passes_without_handlers(store, routes, take):
        return error
    return HandlerFailed(arrival, error.__cause__ or error, Reason.MAX_RETRIES_EXCEEDED)


class _Rehearsed(Exception):
    """Undoes a rehearsal."""


async def _passes_without_handlers(store: InboxStore, routes: Routes, take: Take) -> bool:
    turns = Turns()
    try:
        async with store.transaction() as tx:
            if (taken := await take(tx)) is None:
                return False
            todo = _decide(taken, routes, {}, turns)
            entries = [Entry(each, Applied() if isinstance(outcome, Route) else outcome) for each, outcome in todo]
            await store.conclude(tx, routes.consumer, entries, turns.standings)
            raise _Rehearsed
    except _Rehearsed:
        return True
    except OutriderError:
        return False


async def _transact(store: InboxStore, routes: Routes, take: Take, bury: Mapping[UUID, Buried], turns: Turns) -> None:
    async with store.transaction() as tx:
        taken = await take(tx)
        if taken is None:
            return
        todo = _decide(taken, routes, bury, turns)
        seconds = await _handle(store, routes, todo, tx)
        turns.entries = [
            Entry(arrival, Applied(seconds[arrival.event_id]))
            if isinstance(outcome, Route)
            else Entry(arrival, outcome)
            for arrival, outcome in todo
        ]
        changed = {stream: at for stream, at in turns.standings.items() if at != taken.standings.get(stream)}
        turns.dead_letters = await store.conclude(tx, routes.consumer, turns.entries, changed)


Todo = list[tuple[Arrival, Route | Conclusion]]


def _decide(taken: Taken, routes: Routes, bury: Mapping[UUID, Buried], turns: Turns) -> Todo:
    """Go through the arrivals in order; each sees its stream as the one before it left it."""
    todo: Todo = []
    met: set[UUID] = set()
    turns.standings = dict(taken.standings)
    for arrival in (numbered(arrival, routes.settings) for arrival in taken.arrivals):
        at = turns.standings.get(arrival.stream, Standing())
        if arrival.event_id not in taken.fresh or arrival.event_id in met:
            if arrival.waiting_id is None:
                turns.duplicates.append(arrival)
                continue
            todo.append((arrival, HANDLED_BEFORE))
            _settle(turns, arrival, at)
            continue
        met.add(arrival.event_id)
        decision, otherwise = decide(arrival, at, routes.settings)
        outcome, after = _outcome(arrival, decision, otherwise, routes, bury.get(arrival.event_id))
        todo.append((arrival, outcome))
        _settle(turns, arrival, after, waits=isinstance(outcome, Waits))
    return todo


def _outcome(
    arrival: Arrival, decision: Decision, otherwise: Standing, routes: Routes, bury: Buried | None
) -> tuple[Route | Conclusion, Standing]:
    if isinstance(decision, Waits | Stalled | Dropped):
        return decision, otherwise
    if isinstance(decision, Refuse):
        return _buried(arrival, _poison(decision.error, routes), otherwise, decision.after)
    if bury is not None:
        return _buried(arrival, bury, otherwise, decision.after)
    if arrival.skipped:
        return Dropped("the marker of a skipped event"), decision.after
    if arrival.event is None:
        return _buried(arrival, _poison(arrival.problem, routes), otherwise, decision.after)
    return routes.find(arrival.delivery.topic, arrival.event_type) or NO_HANDLER, decision.after


def _poison(error: str, routes: Routes) -> Buried:
    return Buried(Reason.POISON_MESSAGE, {"error": error}, routes.settings.dead_letter_policy, 0)


def _buried(arrival: Arrival, buried: Buried, at: Standing, after: Standing) -> tuple[Conclusion, Standing]:
    """Bury by policy: the stream goes on as if it had been applied, or waits. Without a key, nobody would wait."""
    if not arrival.keyed:
        return Buried(buried.reason, buried.failure, Policy.SKIP, buried.attempts), after
    return buried, at._replace(cause=Cause.HELD) if buried.policy is Policy.HOLD else after


def _settle(turns: Turns, arrival: Arrival, after: Standing, *, waits: bool = False) -> None:
    """Note where the stream stands now; one that came from the waiting events and does not go on waiting has left."""
    if arrival.waiting_id is not None and not waits:
        left = after.waiting - 1
        after = after._replace(waiting=left, cause=after.cause if left or after.cause is Cause.HELD else None)
    if after != Standing() or arrival.stream in turns.standings:
        turns.standings[arrival.stream] = after


async def _handle(store: InboxStore, routes: Routes, todo: Todo, tx: Any) -> dict[UUID, float]:
    """Run handlers in order. Neighbours with the same batch handler go to it together."""
    seconds: dict[UUID, float] = {}
    turn = [(arrival, outcome) for arrival, outcome in todo if isinstance(outcome, Route)]
    for route, group in groupby(turn, key=lambda pair: pair[1]):
        arrivals = [arrival for arrival, _ in group]
        lots = [arrivals] if route.batch else [[arrival] for arrival in arrivals]
        for lot in lots:
            begun = time.monotonic()
            await call(store, route, lot, tx, routes.settings.handler_timeout_seconds)
            spent = (time.monotonic() - begun) / len(lot)
            seconds.update(dict.fromkeys((arrival.event_id for arrival in lot), spent))
    return seconds


def arrivals_of(store: InboxStore, routes: Routes, arrivals: Sequence[Arrival]) -> Take:
    """Take arrivals that were just delivered."""

    async def take(tx: Any) -> Taken:
        admitted = await store.admit(tx, routes.consumer, arrivals, gated=routes.settings.gated)
        return Taken(arrivals, admitted.fresh, admitted.standings)

    return take


def waiting_of(store: InboxStore, routes: Routes, stream: InboxStream, limit: int) -> Take:
    """Take the first waiting events of a stream that drains."""

    async def take(tx: Any) -> Taken | None:
        strict = routes.settings.gate is Gate.STRICT
        resumed = await store.resume(tx, routes.consumer, stream, by_sequence=strict, limit=limit, early=not strict)
        if resumed is None:
            return None
        arrivals = [_reopen(waiting, stream) for waiting in resumed.waiting]
        return Taken(arrivals, resumed.fresh, {stream: resumed.standing})

    return take


def _reopen(waiting: Waiting, stream: InboxStream) -> Arrival:
    """Open an event that waited. It keeps the identity it had: one without an id would be given another."""
    opened = open_delivery(waiting.delivery)
    return opened._replace(
        event_id=waiting.event_id,
        stream=stream,
        waiting_id=waiting.waiting_id,
        replayed=opened.replayed or waiting.replayed,
    )
