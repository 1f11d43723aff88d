"""Reencryption: brings every stored payload under the active key, in small steps, beside running relays and consumers.

Each page of rows is a transaction of its own, and a row that is under the active key is left alone. So a run that was
killed loses nothing, and the next run goes on where it ended. An event may move between the tables during a pass;
passes are therefore repeated until one finds nothing to do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.errors import InvalidEvent, InvalidPayload, SubjectErased
from outrider.payload.model import PayloadFacts, journal_facts, reply_facts, state_facts
from outrider.privacy.encryption import MARK, FieldEncryption
from outrider.privacy.keys import subject_key_ids
from outrider.privacy.store import CopyKind, PayloadCopy, PrivacyStore, Rewrite

BATCH = 200
"""The rows that are read and written at a time."""

PASSES_MAX = 5

FAILED_MAX = 1_000
"""The most payloads that do not open and are named; the others are counted."""


class UnopenedCopy(NamedTuple):
    """A stored payload that stays as it is, and the reason, without any of its values."""

    kind: CopyKind
    event_id: str
    event_type: str
    problem: str


@dataclass(slots=True)
class Reencryption:
    """One run over all stored payloads. With `dry_run` it only counts what it would write."""

    encryption: FieldEncryption
    store: PrivacyStore
    dry_run: bool = False
    batch: int = BATCH
    examined: Counter[CopyKind] = field(default_factory=Counter)
    """The payloads of the last pass."""
    written: Counter[CopyKind] = field(default_factory=Counter)
    """The payloads that were encrypted again, in all passes."""
    erased: Counter[CopyKind] = field(default_factory=Counter)
    """The payloads of the last pass whose subjects were erased, which stay as they are."""
    failed: int = 0
    named: list[UnopenedCopy] = field(default_factory=list)

    async def run(self, progress: Callable[[int], None] = lambda examined: None) -> bool:
        """Run passes until one finds nothing to do; return False if other processes still write under another key.

        `progress` is told the number of payloads that the pass has examined.
        """
        await asyncio.to_thread(self.encryption.keys.reload)
        for _ in range(PASSES_MAX):
            found = await self._pass(progress)
            if found == 0 or self.dry_run:
                return found == 0
        return False

    async def _pass(self, progress: Callable[[int], None]) -> int:
        """Go through all kinds once; return the number of payloads that were not under the active key."""
        self.examined.clear()
        self.erased.clear()
        self.named.clear()
        self.failed, found = 0, 0
        for kind in CopyKind:
            after: tuple[Any, ...] | None = None
            while True:
                page = await self.store.copies(kind, after, self.batch)
                await self._load_keys(kind, page.copies)
                rewrites = [rewrite for copy in page.copies if (rewrite := self._rewrite(kind, copy)) is not None]
                found += len(rewrites)
                if rewrites:
                    self.written[kind] += len(rewrites) if self.dry_run else await self.store.rewrite(kind, rewrites)
                self.examined[kind] += len(page.copies)
                progress(self.examined.total())
                if (after := page.after) is None:
                    break
        return found

    async def _load_keys(self, kind: CopyKind, copies: Sequence[PayloadCopy]) -> None:
        """Read the keys of a page at once, and make the keys of subjects whose values are still under the ring."""
        texts = [(copy, copy.text.encode()) for copy in copies if copy.text is not None and MARK in copy.text]
        await self.encryption.load([], [text for _, text in texts])
        if not self.dry_run:
            # A payload with a value under the key of a subject may be erased, and must not make a new key.
            ring = [facts_of(kind, copy) for copy, text in texts if not subject_key_ids(text)]
            await self.encryption.load([(facts.event_type, facts.subject) for facts in ring if facts.subject], [])

    def _rewrite(self, kind: CopyKind, copy: PayloadCopy) -> Rewrite | None:
        if copy.text is None:
            return None
        facts = facts_of(kind, copy)
        try:
            if self.dry_run:
                return None if self.encryption.is_current(facts, copy.text) else Rewrite(copy, copy.text)
            text = self.encryption.reencrypt(facts, copy.text)
        except SubjectErased:
            self.erased[kind] += 1
        except (InvalidPayload, InvalidEvent) as error:
            self._fail(kind, copy, f"{error.path}: {error.problem}")
        except (ValueError, RecursionError):
            # A body that is no JSON holds no encrypted value.
            pass
        else:
            return None if text is None else Rewrite(copy, text)
        return None

    def _fail(self, kind: CopyKind, copy: PayloadCopy, problem: str) -> None:
        self.failed += 1
        if len(self.named) < FAILED_MAX:
            shown = " ".join(copy.names) if kind is CopyKind.PARTICIPANT_REPLY else str(copy.event_id)
            self.named.append(UnopenedCopy(kind, shown, copy.event_type, problem))


def facts_of(kind: CopyKind, copy: PayloadCopy) -> PayloadFacts:
    """Return the facts that are bound to the encrypted values of a copy."""
    if kind is CopyKind.SAGA_STATE:
        return state_facts(copy.event_id, copy.event_type, copy.subject)
    if kind is CopyKind.SAGA_JOURNAL:
        step, phase = copy.names
        return journal_facts(copy.event_id, step, phase, copy.subject)
    if kind is CopyKind.PARTICIPANT_REPLY:
        participant, key, phase = copy.names
        return reply_facts(participant, key, phase, {"event_type": copy.event_type, "subject": copy.subject})
    return PayloadFacts(copy.event_id, copy.event_type, 1, "", None, copy.subject)
