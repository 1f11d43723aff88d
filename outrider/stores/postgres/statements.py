"""What is written through a caller's connection to PostgreSQL: which statements, with what, and what their rows mean.

Each function is a generator: it yields a statement, is sent its rows, and returns the result. It knows no driver, so
the same lines serve all of them, awaited or not. Rows are read by position. Only ids, texts and booleans come back,
because drivers differ in what they make of JSON and of times.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from outrider.saga_store import Entered, NewMail, NewSaga, Phase
from outrider.store import Draft, Drafts, Hold, Placed
from outrider.stores.postgres import queries
from outrider.stores.postgres.saga_parameters import post_parameters, start_parameters
from outrider.stores.postgres.staging import counter_parameters, stage_parameters

T = TypeVar("T")

UNIQUE_VIOLATION = "23505"
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Statement(NamedTuple):
    """One statement, its parameters, and which SQLSTATE means that the transaction may be tried again, and why."""

    sql: str
    args: Sequence[Any]
    transient: Mapping[str, str] = _NOTHING


Rows = Sequence[Sequence[Any]]
Script = Generator[Statement, Rows, T]
"""Yields statements, is sent their rows, returns what came of it."""

_CROSSED = {
    UNIQUE_VIOLATION: "the same event_id is being staged for another stream at this moment; retry the transaction, and "
    "give each event an id of its own"
}


def stage(schema: str, drafts: Drafts, hold: Hold | None) -> Script[list[Placed]]:
    """Insert drafts: one statement, or two where known ids must be looked up.

    >>> from outrider.event import Event
    >>> from outrider.outbox.stage import StagingRules, drafts
    >>> script = stage("outrider", drafts([Event("order.placed", {})], StagingRules()), None)
    >>> next(script).sql.startswith("-- The most common call")
    True
    """
    sql = queries.load(schema)
    placed = (yield from _stage_plain(sql, drafts, hold)) if drafts.plain else []
    return placed + ((yield from _stage_numbered(sql, drafts, hold)) if drafts.numbered else [])


def start_saga(schema: str, new: NewSaga) -> Script[bool]:
    """Insert a saga; False if it is there already."""
    return bool((yield Statement(queries.load_saga(schema)["start"], start_parameters(new))))


def post_mail(schema: str, mail: Sequence[NewMail]) -> Script[int]:
    """Insert mail to sagas; return how many were new."""
    return len((yield Statement(queries.load_saga(schema)["post"], post_parameters(mail))))


def barrier_enter(schema: str, participant: str, key: str, phase: Phase) -> Script[Entered]:
    """Let a command through a participant's barrier, or say what became of it before."""
    sql = queries.load_saga(schema)
    if rows := (yield Statement(sql[f"enter_{phase.value}"], (participant, key))):
        return Entered(True, rows[0][0])
    [(barred, reply)] = yield Statement(sql["answered"], (participant, key, phase.value))
    return Entered(False, barred, None if reply is None else reply.encode())


def barrier_keep(schema: str, participant: str, key: str, phase: Phase, reply: bytes) -> Script[None]:
    """Keep what was answered to a command, as JSON."""
    yield Statement(queries.load_saga(schema)["keep"], (participant, key, phase.value, reply.decode()))


SCRIPTS: Mapping[str, Callable[..., Script[Any]]] = {
    "stage": stage,
    "start_saga": start_saga,
    "post_mail": post_mail,
    "barrier_enter": barrier_enter,
    "barrier_keep": barrier_keep,
}


def _stage_plain(sql: dict[str, str], drafts: Drafts, hold: Hold | None) -> Script[list[Placed]]:
    if hold is None and len(drafts.plain) == 1:
        rows = yield Statement(sql["stage_one"], drafts.plain[0])
    else:
        rows = yield _several(sql["stage"], drafts.plain, hold)
    placed = _placed(rows)
    if not drafts.supplied or not placed:
        return placed
    taken_back = yield Statement(sql["retract"], ([row.event_id for row in placed],))
    gone = {row[0] for row in taken_back}
    return [row for row in placed if row.event_id not in gone]


def _stage_numbered(sql: dict[str, str], drafts: Drafts, hold: Hold | None) -> Script[list[Placed]]:
    if hold is None and len(drafts.numbered) == 1 and not drafts.supplied:
        return _placed((yield Statement(sql["stage_numbered_one"], drafts.numbered[0])))
    yield Statement(sql["lock_counters"], counter_parameters(drafts.numbered))
    return _placed((yield _several(sql["stage_numbered"], drafts.numbered, hold)._replace(transient=_CROSSED)))


def _several(sql: str, drafts: Sequence[Draft], hold: Hold | None) -> Statement:
    return Statement(sql, stage_parameters(drafts, hold))


def _placed(rows: Rows) -> list[Placed]:
    return [Placed(row[0], row[1] == "optimistic") for row in rows]
