"""The contract of the store of erasure: where data of subjects is stored, and the log of erasures.

A subject is a text such as `customer:42`. Events carry the subject in the header `subject`, sagas in a column. A store
removes both in the same write as the contents, so a repeated run finds exactly the rows that are left.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class ErasurePlace(StrEnum):
    """The places with contents that are erased where they are. Their rows stay."""

    DEAD_LETTER = "dead letter"
    CONSUMER_DEAD_LETTER = "consumer dead letter"
    SAGA = "saga"
    REMOVED_SAGA = "audit log of a removed saga"
    ARCHIVED_EVENT = "archived event"


class Blocker(StrEnum):
    """The kinds of rows that stand in the way of an erasure, because something would be lost."""

    EVENT = "undelivered event"
    DEAD_LETTER = "dead letter that blocks its stream"
    HELD_EVENT = "event that waits at a consumer"
    CONSUMER_DEAD_LETTER = "dead letter that blocks its stream at a consumer"
    SAGA = "saga that has not ended"


DISCARDED: Mapping[Blocker, str] = {
    Blocker.EVENT: "discarded event",
    Blocker.DEAD_LETTER: "discarded dead letter",
    Blocker.HELD_EVENT: "skipped event at a consumer",
    Blocker.CONSUMER_DEAD_LETTER: "discarded dead letter of a consumer",
}
"""The words of the receipt for rows that `--discard-undelivered` removes."""


class Blocking(NamedTuple):
    """A row that stands in the way. `id` is that of an event, of a dead letter of a consumer, or of a saga."""

    kind: Blocker
    id: Any
    name: str
    """The type of the event or of the saga."""
    place: str
    """The topic and key of an event, the consumer and topic of a held one, the status of a saga."""
    consumer: str = ""
    """The consumer at which an event waits."""
    headers: str = "{}"
    """The headers of a held event, as stored."""


class SubjectRow(NamedTuple):
    """A stored row of a subject: the columns that identify the row, and the texts that are replaced."""

    key: tuple[Any, ...]
    subject: str
    name: str
    """The type of the event or of the saga."""
    headers: str = "{}"
    """The headers as stored: for consumers an object of base64."""
    sealed: bool = False
    """Whether the payload of an archived event has a value under the key of a subject."""


class SubjectPage(NamedTuple):
    """The rows of subjects in a part of a place, the place after which the next part begins, and the part examined.

    `after` is None at the end. `share` grows to 1.
    """

    rows: Sequence[SubjectRow]
    after: Any
    share: float


class Replacement(NamedTuple):
    """A row and its new headers, without the subject, so that the row is found no more."""

    row: SubjectRow
    headers: str
    saga_key: str | None = None
    """The key of the participant's reply that belongs to the event."""


class ErasureRun(NamedTuple):
    """A row of the log of erasures. `counts` grow with each committed page, and `receipt` is set at the end."""

    id: Any
    subject_hash: str
    actor: str
    started_at: datetime
    finished_at: datetime | None
    counts: Mapping[str, Any]
    receipt: Mapping[str, Any] | None

    @property
    def erased(self) -> Counter[str]:
        """Return the number of erased rows by place."""
        return Counter(self.counts.get("erased", {}))

    @property
    def readable(self) -> Counter[str]:
        """Return the number of published events by type whose payload had no value under the key of the subject."""
        return Counter(self.counts.get("readable", {}))


Runs = Mapping[str, Any]
"""The ids of the open runs by subject."""


def add_counts(counts: str, erased: Mapping[str, int], readable: Iterable[str] = ()) -> str:
    """Return the counts of a run, as JSON text, with more erased rows by place and readable events by type.

    >>> add_counts('{"erased": {"saga": 1}, "readable": {}}', {"saga": 2}, ["order.placed"])
    '{"erased": {"saga": 3}, "readable": {"order.placed": 1}}'
    """
    known = json.loads(counts)
    totals = Counter(known.get("erased", {})) + Counter(erased), Counter(known.get("readable", {})) + Counter(readable)
    return json.dumps({"erased": totals[0], "readable": totals[1]})


class ErasureStore(Protocol):
    """All rows of subjects in a database, and the log of erasures.

    Each change is one short transaction, in which the counts of the run are written too. A row that another transaction
    has locked, or that has changed meanwhile, is left for a later pass.
    """

    async def runs(self, hashes: Collection[str]) -> list[ErasureRun]:
        """Return the runs of some subjects, oldest first."""
        ...

    async def open_run(self, hash: str, actor: str) -> ErasureRun:
        """Return the open run of a subject; without one, open a run."""
        ...

    async def finish_run(self, run_id: Any, receipt: Mapping[str, Any]) -> bool:
        """Write the receipt and the end of an open run; False if the run has ended."""
        ...

    async def blocking(self, subjects: Collection[str], limit: int) -> list[Blocking]:
        """Return rows that stand in the way, at most `limit` of each kind, each kind as of one moment."""
        ...

    async def skip_held(self, row: Blocking, headers: str, actor: str) -> bool:
        """Turn an event that waits at a consumer into the marker of a skipped event, and record the operation."""
        ...

    async def count(self, run_id: Any, place: str, count: int) -> None:
        """Add rows that were discarded, or erased elsewhere, to the counts of a run."""
        ...

    async def page(self, place: ErasurePlace, subjects: Collection[str], after: Any) -> SubjectPage:
        """Return the rows of subjects in the next part of a place. A part is bounded, whatever it contains."""
        ...

    async def erase_events(self, place: ErasurePlace, rows: Sequence[Replacement], runs: Runs) -> int:
        """Replace payload, headers and failure of events, and the replies of participants that belong to them."""
        ...

    async def erase_saga(self, place: ErasurePlace, row: SubjectRow, run_id: Any) -> bool:
        """Erase an ended saga: audit details, journal, mailbox, replies of participants, state, and last its subject.

        Of a removed saga, only the audit details are there.
        """
        ...

    async def close(self) -> None:
        """Close connections and threads."""
        ...
