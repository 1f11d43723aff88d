"""Erasure: removes the contents of everything that is stored about a subject, and destroys the key of the subject.

Ids, types, topics, keys and numbers stay, so that counts and order stay. Each page of rows is a transaction of its own
that also removes the subject from the rows, so a run that was killed goes on where it ended. An event may move between
the tables during a pass; passes are therefore repeated until one finds nothing.

The key is destroyed after the contents: until then a run may stop because an event of the subject has arrived, and that
event must still open. After the key, one more pass takes what was staged meanwhile.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from outrider.event import ERASED_TEXT, SKIPPED_TYPE, SUBJECT_HEADER, erased_name, subject_hash
from outrider.privacy.erasure_store import (
    DISCARDED,
    Blocker,
    Blocking,
    ErasurePlace,
    ErasureRun,
    ErasureStore,
    Replacement,
    SubjectRow,
)
from outrider.privacy.store import SubjectKeyStore, WrappedSubjectKey
from outrider.privacy.subjects import SubjectKeys

BLOCKING_MAX = 200
"""The most rows of each kind that stand in the way and are read at a time."""

BATCH = 200
"""The rows that are written in one transaction."""

PASSES_MAX = 5

LOG = "message in the embedded log"
"""The place of messages in the log of the embedded broker."""

TECHNICAL = frozenset(
    {
        *("message_id", "event_type", "key", "schema_version", "created_at", "correlation_id", "causation_id"),
        *("trace_id", "traceparent", "sequence", "aggregate_type", "aggregate_id", "saga_id", "band", "gapless"),
        *("replayed", "skipped", "dataschema", "saga_key", "saga_phase", "saga_answered"),
    }
)
"""The headers that stay: ids, numbers and types, which consumers need. All others belong to the application."""

SAGA_KEY = "saga_key"

UNREACHABLE = (
    "messages in brokers: fields under the key of the subject cannot be opened any more; all other fields of them stay "
    "readable until the broker removes the messages",
    "backups and replicas that are older than this run",
    "replies of participants and messages of other sagas that name no subject, until their retention removes them",
    "the last values of increasing fields",
    "tables of your application",
    "the databases of other services that received the events: run this command there, too",
)
"""The copies that no run reaches, for the receipt."""


@dataclass(frozen=True, slots=True)
class KeyDestruction:
    """The destruction of keys of subjects in a store. It needs no master key, and it asks the store each time."""

    store: SubjectKeyStore

    async def destroy(self, subject: str) -> list[str]:
        """Destroy the key of a subject; return its id, empty without one."""
        return await self.store.destroy_subject_key(subject)

    async def destroyed(self, subject: str) -> list[WrappedSubjectKey]:
        """Return the destroyed keys of a subject."""
        found = await self.store.subject_keys([erased_name(subject)], [])
        return [each for each in found if each.destroyed_at is not None]


class MessageLog(Protocol):
    """The log of the embedded broker."""

    def subjects(self, subjects: Collection[str]) -> AsyncGenerator[Sequence[Any], None]:
        """Yield the messages of subjects, a part of the log at a time; each has its headers."""
        ...

    async def erase(self, messages: Sequence[Any], body: bytes) -> None:
        """Replace the headers and the bodies of messages."""
        ...


class Traces(NamedTuple):
    """The rows of one subject that a search has found."""

    subject: str
    rows: Counter[str]
    blocking: list[Blocking]


class ErasureResult(NamedTuple):
    """The end of a run over one subject.

    `blocking` stands in the way, or has arrived during the run; then the run stays open and is to be repeated.
    `left` counts rows that other transactions have locked or changed in every pass.
    """

    subject: str
    run: ErasureRun | None
    blocking: Sequence[Blocking] = ()
    left: int = 0
    repeated: bool = False
    """Whether an earlier run had erased everything, so that this one has changed nothing."""

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing is left."""
        return not self.blocking and not self.left


@dataclass(slots=True)
class Erasure:
    """One run over some subjects, who share the scans.

    `discard` settles a row that stands in the way, and returns False if the row has changed. Without `discard`, such
    rows stop the run. Sagas that have not ended always stop the run: their steps need their state, and only their steps
    can compensate what they have done.
    """

    subjects: Sequence[str]
    store: ErasureStore
    keys: KeyDestruction | SubjectKeys
    actor: str
    discard: Callable[[Blocking], Awaitable[bool]] | None = None
    log: MessageLog | None = None
    progress: Callable[[str, float], None] = lambda place, share: None

    async def search(self) -> list[Traces]:
        """Count all rows of the subjects, without any change."""
        found = {subject: Counter[str]() for subject in self.subjects}
        for place in ErasurePlace:
            async for rows in self._pages(place):
                for row in rows:
                    found[row.subject][place] += 1
        if self.log:
            async for messages in self.log.subjects(self.subjects):
                for message in messages:
                    found[message.headers[SUBJECT_HEADER]][LOG] += 1
        return [
            Traces(subject, rows, await self.store.blocking([subject], BLOCKING_MAX)) for subject, rows in found.items()
        ]

    async def run(self) -> list[ErasureResult]:
        """Erase the subjects. A run that stops, or is killed, is repeated with the same call."""
        if blocked := await self._blocked():
            return blocked
        if (repeated := await self._repeated()) and not await self._is_anything_left():
            return repeated
        runs = {subject: (await self.store.open_run(subject_hash(subject), self.actor)).id for subject in self.subjects}
        await self._discard(runs)
        left = await self._erase(runs)
        if left or (await self._blocked(discarding=False)):
            return await self._results(left)
        for attempt in range(PASSES_MAX):
            # A key that is made during a pass goes with the next one: its events are not handled, as those before.
            made = any([await self.keys.destroy(subject) for subject in self.subjects])
            if attempt and not made:
                break
            await self._discard(runs)
            if left := await self._erase(runs):
                break
        else:
            # Programs go on to stage for the subject, and the last key that they have made is alive.
            left = 1
        results = await self._results(left)
        for result in results:
            if result.is_complete and result.run:
                await self.store.finish_run(result.run.id, await self._receipt(result))
        return await self._results(left)

    async def _blocked(self, *, discarding: bool = True) -> list[ErasureResult]:
        """Return results if something stands in the way of any subject."""
        rows = await self.store.blocking(self.subjects, BLOCKING_MAX)
        fatal = [row for row in rows if row.kind is Blocker.SAGA or not (discarding and self.discard)]
        return await self._results(0) if fatal else []

    async def _is_anything_left(self) -> bool:
        """Search again after a run. A key that was made since then, for events that are gone by now, is destroyed."""
        if any(traces.rows for traces in await self.search()):
            return True
        return any([await self.keys.destroy(subject) for subject in self.subjects])

    async def _repeated(self) -> list[ErasureResult]:
        """Return the last runs of the subjects, if each subject has one and none of them is open."""
        runs = await self.store.runs([subject_hash(subject) for subject in self.subjects])
        last = {run.subject_hash: run for run in runs}
        hashes = [subject_hash(subject) for subject in self.subjects]
        if any(hash not in last or last[hash].finished_at is None for hash in hashes):
            return []
        return [
            ErasureResult(subject, last[hash], repeated=True)
            for subject, hash in zip(self.subjects, hashes, strict=True)
        ]

    async def _results(self, left: int) -> list[ErasureResult]:
        results = []
        for subject in self.subjects:
            runs = await self.store.runs([subject_hash(subject)])
            rows = await self.store.blocking([subject], BLOCKING_MAX)
            results.append(ErasureResult(subject, runs[-1] if runs else None, rows, left))
        return results

    async def _receipt(self, result: ErasureResult) -> dict[str, Any]:
        assert result.run
        return {
            "keys_destroyed": [key.id for key in await self.keys.destroyed(result.subject)],
            "readable_in_brokers": dict(result.run.readable),
            "not_reached": list(UNREACHABLE),
        }

    async def _discard(self, runs: Mapping[str, Any]) -> None:
        """Settle undelivered events until none is left that can be; sagas stay."""
        if self.discard is None:
            return
        for subject, run_id in runs.items():
            settled = 1
            while settled:
                rows = [row for row in await self.store.blocking([subject], BLOCKING_MAX) if row.kind in DISCARDED]
                counts = Counter([row.kind for row in rows if await self._settle(row)])
                settled = counts.total()
                for kind, count in counts.items():
                    await self.store.count(run_id, DISCARDED[kind], count)
                self.progress("undelivered events", 0.0)

    async def _settle(self, row: Blocking) -> bool:
        assert self.discard
        if row.kind is Blocker.HELD_EVENT:
            return await self.store.skip_held(row, skipped_headers(row.headers), self.actor)
        return await self.discard(row)

    async def _erase(self, runs: Mapping[str, Any]) -> int:
        """Run passes until one finds nothing; return the number of rows that the last pass has found."""
        found = 0
        for _ in range(PASSES_MAX):
            found = sum([await self._erase_place(place, runs) for place in ErasurePlace])
            found += await self._erase_log(runs)
            if not found:
                return 0
        return found

    async def _erase_place(self, place: ErasurePlace, runs: Mapping[str, Any]) -> int:
        found = 0
        async for rows in self._pages(place):
            found += len(rows)
            if place in (ErasurePlace.SAGA, ErasurePlace.REMOVED_SAGA):
                for row in rows:
                    await self.store.erase_saga(place, row, runs[row.subject])
            else:
                for start in range(0, len(rows), BATCH):
                    batch = [replacement(place, row) for row in rows[start : start + BATCH]]
                    await self.store.erase_events(place, batch, runs)
        return found

    async def _erase_log(self, runs: Mapping[str, Any]) -> int:
        if self.log is None:
            return 0
        found = Counter[str]()
        async for messages in self.log.subjects(self.subjects):
            counts = Counter(message.headers[SUBJECT_HEADER] for message in messages)
            # Counted first: a run that is killed between the two counts them twice, and never too few.
            for subject, count in counts.items():
                await self.store.count(runs[subject], LOG, count)
            kept = [message._replace(headers=kept_headers(message.headers)) for message in messages]
            await self.log.erase(kept, ERASED_TEXT.encode())
            found += counts
        return found.total()

    async def _pages(self, place: ErasurePlace) -> AsyncIterator[Sequence[SubjectRow]]:
        after: Any = None
        while True:
            page = await self.store.page(place, self.subjects, after)
            self.progress(place, page.share)
            yield page.rows
            if (after := page.after) is None:
                return


def replacement(place: ErasurePlace, row: SubjectRow) -> Replacement:
    """Return the new headers of an event, and the key of the participant's reply that belongs to it."""
    headers = json.loads(row.headers)
    key = headers.get(SAGA_KEY)
    if place is ErasurePlace.CONSUMER_DEAD_LETTER and key is not None:
        key = base64.b64decode(key).decode(errors="replace")
    return Replacement(row, json.dumps(kept_headers(headers)), key if isinstance(key, str) else None)


def kept_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers that stay.

    >>> kept_headers({"subject": "customer:42", "traceparent": "00-1", "note": "for Ann"})
    {'traceparent': '00-1'}
    """
    return {name: value for name, value in headers.items() if name in TECHNICAL}


def skipped_headers(stored: str) -> str:
    """Return the headers of the marker of a skipped event, as an object of base64.

    >>> skipped_headers('{"event_type": "b3JkZXI=", "subject": "YQ=="}')
    '{"event_type": "b3V0cmlkZXIuc2tpcHBlZA=="}'
    """
    marker = base64.b64encode(SKIPPED_TYPE.encode()).decode()
    return json.dumps({**kept_headers(json.loads(stored)), "event_type": marker})


def in_words(rows: Sequence[Blocking]) -> Iterator[str]:
    """Return what stands in the way, and the commands that help, one line for each kind."""
    for kind, count in Counter(row.kind for row in rows).items():
        first = next(row for row in rows if row.kind is kind)
        more = f" and {count - 1} more" if count > 1 else ""
        yield f"{kind}: {first.name} {first.id} ({first.place}){more}; {REMEDIES[kind]}"


REMEDIES: Mapping[Blocker, str] = {
    Blocker.EVENT: "run the relay until it is delivered: outrider relay --until-empty",
    Blocker.DEAD_LETTER: "replay or discard it: outrider dead-letters replay|discard ID",
    Blocker.HELD_EVENT: "let its consumer handle it: outrider consume; a gap ends with: outrider inbox skip-gap",
    Blocker.CONSUMER_DEAD_LETTER: "replay or discard it: outrider inbox replay|discard ID",
    Blocker.SAGA: "let it end, or give it up: outrider saga compensate ID",
}
"""The commands after which a row stands in the way no more."""
