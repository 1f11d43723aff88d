"""What became of the commands of a saga, as far as its own store knows: still in the outbox, buried, or on their way.

A saga that waits for an answer may wait because its question never left. The journal cannot know that; the outbox does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from outrider import app
from outrider.cli.options import Place
from outrider.errors import OutriderError
from outrider.saga.acting import PHASE_HEADER
from outrider.saga.graph import span
from outrider.saga.remedies import Help
from outrider.saga.steps import Definition
from outrider.saga_store import Entry, Phase, Progress, Record
from outrider.store import Criteria

EVENTS_MAX = 20
FACTS = ("event_id", "state", "event_type", "topic", "attempts", "created_at", "buried_at", "reason", "failure")
COLUMNS = ("event_id", "state", "event_type", "topic", "attempts", "created_at")
ELSEWHERE = "--store URL of the participant's store"


class Post(NamedTuple):
    """What is in the outbox and in the dead letters under the key of a saga, and how many relays are alive."""

    undelivered: Sequence[dict[str, Any]] = ()
    dead: Sequence[dict[str, Any]] = ()
    relays: int = 0
    trouble: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return it for programs, without payloads."""
        rows = [{name: row[name] for name in FACTS if name in row} for row in (*self.undelivered, *self.dead)]
        return {"events": rows, "relays": self.relays, "trouble": self.trouble}


async def look(place: Place, saga_id: UUID) -> Post:
    """Look at what is staged under the key of a saga; who may not look is told so, and all the rest."""
    chosen = place.read()
    criteria = Criteria(key=str(saga_id), limit=EVENTS_MAX)
    try:
        store = await app.open_store(chosen.store_url(), schema=chosen.schema)
        try:
            desk = store.desk
            return Post(await desk.events(criteria), await desk.dead_letters(criteria), await desk.relays())
        finally:
            await store.close()
    except OutriderError as error:
        return Post(trouble=str(error))


def reasons(post: Post, now: datetime) -> Iterator[str]:
    """Say what has not left yet, and what never will by itself."""
    if post.trouble:
        yield f"the outbox could not be looked at: {post.trouble}"
    for row in post.undelivered:
        nobody = "" if post.relays else ", and no relay is running"
        yield f"the {_kind(row)} is still in the outbox, {row['state']}, since {_since(row['created_at'], now)}{nobody}"
    for row in post.dead:
        yield f"the {_kind(row)} is in the dead letters, since {_since(row['buried_at'], now)}: {row['reason']}"


def helps(post: Post, record: Record, definition: Definition | None) -> Iterator[Help]:
    """Say what to run: a relay, a replay, or a look at the participant."""
    if post.undelivered and not post.relays:
        yield Help("outrider relay", "publishes what is in the outbox; it needs the same --store, and the --broker")
    for row in post.dead:
        yield Help(f"outrider dead replay {row['event_id']}", f"sends the {_kind(row)} again")
    asked = [] if post.undelivered or post.dead or post.trouble else list(_asked(record, definition))
    for entry in asked[:1]:
        yield Help(
            f"outrider inbox dead {ELSEWHERE}",
            f"shows whether the command of {entry.step}, which has left, is a dead letter of its participant",
        )
        yield Help(f"outrider inbox streams {ELSEWHERE}", "shows whether it waits there")


def _asked(record: Record, definition: Definition | None) -> Iterator[Entry]:
    """Yield the steps whose command is out, and not answered; the definition tells them from those that only wait."""
    for entry in record.journal:
        step = definition.steps.get(entry.step) if definition else None
        act = (step.action if entry.phase is Phase.ACTION else step.undo) if step else None
        open_ = entry.progress in (Progress.INTENDED, Progress.RETRYING, Progress.FAILED)
        if open_ and act and act.command and act.command.event_type:
            yield entry


def _kind(row: dict[str, Any]) -> str:
    return f"{'command' if PHASE_HEADER in (row['headers'] or {}) else 'event'} {row['event_type']}"


def _since(moment: datetime, now: datetime) -> str:
    seconds = max(0.0, (now - moment).total_seconds())
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S} ({span(seconds)} ago)"
