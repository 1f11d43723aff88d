"""The keys of subjects: one random key for each person, in a store, wrapped with a master key.

To destroy the key of a subject makes all its values unreadable, wherever copies of them are. A destroyed key stays as a
row without secret and without the name of its subject, so that a consumer can tell an erased value from a value whose
key is missing. A later event of the same subject gets a new key.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from outrider.background import Background
from outrider.errors import KeysUnavailable, OutriderError
from outrider.event import erased_name
from outrider.privacy.keys import KEY_BYTES, PAUSE_SECONDS, DataKey, KeyRing, SubjectKey
from outrider.privacy.store import (
    ANSWER_SECONDS,
    NewSubjectKey,
    SubjectKeyCounts,
    SubjectKeyStore,
    WrappedSubjectKey,
    active_master,
    master_of,
    required_key,
    unwrap_key,
    wrap_key,
)

KEY_SECONDS = 60.0
"""The longest time for which a process uses a key without asking the store whether it was destroyed."""

CACHED_MAX = 10_000
"""The most keys in memory; those that were not used for the longest time go first."""

PAGE = 500
"""The keys that `rewrap` reads and writes at a time."""

TRIES_MAX = 3

T = TypeVar("T")


class CachedKey(NamedTuple):
    """A key in memory, and the time of its reading. Without `found`, the store has no key with this id."""

    found: SubjectKey | None
    read_at: float

    @property
    def is_fresh(self) -> bool:
        """Return whether the key may be used without asking the store."""
        seconds = PAUSE_SECONDS if self.found is None else KEY_SECONDS
        return time.monotonic() - self.read_at < seconds


class SubjectKeys:
    """The keys of subjects in a store. Make the object with `outrider.app.stored_subject_keys`.

    A key is made when the first event of its subject is staged, and committed before that event. The store is read on
    a loop of its own, through one connection that stays open. Without any master key the object knows no keys, so that
    a relay runs without secrets::

        master = KeyRing.from_environment("SHOP_MASTER_KEYS")
        subjects = stored_subject_keys("postgresql://localhost/shop", master=master)
        encryption = FieldEncryption(keys=keys, sensitive={"order.placed": ["customer.email"]}, subjects=subjects)
    """

    def __init__(self, opening: Callable[[], Awaitable[SubjectKeyStore]], where: str, master: KeyRing) -> None:
        self._opening, self.master = opening, master
        self.where = f"the table of the keys of subjects in {where}, opened with the master keys of {master.where},"
        self._background = Background("outrider-subject-keys")
        self._keys: OrderedDict[str, CachedKey] = OrderedDict()
        self._live: dict[str, str] = {}
        self._memory = threading.Lock()
        self._store: SubjectKeyStore | None = None
        self._turn: asyncio.Lock | None = None
        self._process = 0
        self._failed_at, self._error = float("-inf"), ""

    def key_of(self, subject: str) -> DataKey | None:
        if (found := self._live_key(subject)) is None:
            if self.master.active() is None:
                return None
            self._wait(self._read([subject], []))
            found = self._live_key(subject)
        if found is None or found.key is None:
            problem = "it was destroyed at the same moment" if found is None else found.problem
            raise KeysUnavailable(f"the key of the subject cannot be used: {problem}")
        return found.key

    def find(self, key_id: str) -> SubjectKey | None:
        if (cached := self._cached(key_id)) is None:
            if self.master.active() is None:
                return None
            self._wait(self._read([], [key_id]))
            cached = self._cached(key_id)
        return None if cached is None else cached.found

    async def load(self, subjects: Iterable[str], key_ids: Iterable[str]) -> None:
        new = [subject for subject in subjects if self._live_key(subject) is None]
        unknown = [key_id for key_id in key_ids if self._cached(key_id) is None]
        if not (new or unknown) or self._has_failed():
            return
        try:
            if self.master.active() is not None:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._perform(self._read(new, unknown))
        except (OutriderError, TimeoutError) as error:
            # The call that needs a key raises it.
            self._fail(error)

    async def destroy(self, subject: str) -> list[str]:
        """Destroy the key of a subject; return its id, empty without one. A second call changes nothing.

        Other processes may use the key until they ask the store again, within a minute.
        """
        destroyed = await self._perform(self._with_store(lambda store: store.destroy_subject_key(subject)))
        with self._memory:
            for key_id in {*destroyed, self._live.pop(subject, "")}:
                self._keys.pop(key_id, None)
        return destroyed

    async def destroyed(self, subject: str) -> list[WrappedSubjectKey]:
        """Return the destroyed keys of a subject."""
        found = await self._perform(self._with_store(lambda store: store.subject_keys([erased_name(subject)], [])))
        return [each for each in found if each.destroyed_at is not None]

    async def counts(self) -> SubjectKeyCounts:
        """Count the keys in use and the destroyed ones."""
        return await self._perform(self._with_store(lambda store: store.count_subject_keys()))

    async def rewrap(self, progress: Callable[[int], None] = lambda examined: None) -> int:
        """Wrap all keys with the active master key; return the number of keys that had another one.

        Each page is committed at once, so a run that was killed goes on where it ended.
        """
        master = active_master(self.master)

        async def work(after: str, store: SubjectKeyStore) -> tuple[int, list[WrappedSubjectKey]]:
            page = await store.subject_key_page(after, PAGE)
            old = [(each, each.wrapped) for each in page if each.wrapped and master_of(each.wrapped) != master.id]
            keys = [required_key(self.master, each.id, form, self.where, each.subject) for each, form in old]
            changes = [
                (each.id, form, wrap_key(self.master, key, each.subject))
                for (each, form), key in zip(old, keys, strict=True)
            ]
            return await store.rewrap_subject_keys(changes) if changes else 0, page

        written, examined, after = 0, 0, ""
        while True:
            done, page = await self._perform(self._with_store(partial(work, after)))
            written, examined = written + done, examined + len(page)
            progress(examined)
            if len(page) < PAGE:
                return written
            after = page[-1].id

    def close(self) -> None:
        """Close the connection and end the thread. A later call opens both again."""
        atexit.unregister(self._close_at_exit)
        if self._store is not None and self._process == os.getpid():
            self._background.run(self._close_store()).result(ANSWER_SECONDS)
        self._background.close()

    async def _perform(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the loop of the keys, while the caller's loop goes on."""
        return await asyncio.wrap_future(self._background.run(work))

    def _wait(self, reading: Coroutine[Any, Any, None]) -> None:
        """Block until keys are read. A store that has just failed would cost each caller its whole time limit."""
        if self._has_failed():
            reading.close()
            raise KeysUnavailable(self._error)
        try:
            self._background.run(reading).result(ANSWER_SECONDS)
        except (OutriderError, TimeoutError) as error:
            self._fail(error)
            raise KeysUnavailable(self._error) from error

    def _has_failed(self) -> bool:
        return time.monotonic() - self._failed_at < PAUSE_SECONDS

    def _fail(self, error: BaseException) -> None:
        self._error = f"{self.where} cannot be read ({str(error) or 'no answer'})"
        self._failed_at = time.monotonic()

    async def _read(self, subjects: Sequence[str], key_ids: Sequence[str]) -> None:
        """Read keys into memory. A subject without a live key gets one; of two processes, both use the first key."""

        async def work(store: SubjectKeyStore) -> None:
            wanted = {subject for subject in subjects if self._live_key(subject) is None}
            read_at = time.monotonic()
            found = await store.subject_keys(sorted(wanted), key_ids)
            for _ in range(TRIES_MAX):
                lacking = sorted(wanted - {each.subject for each in found if each.destroyed_at is None})
                if not lacking:
                    break
                await store.insert_subject_keys([self._new(subject) for subject in lacking])
                found += await store.subject_keys(lacking, [])
            self._keep(found, key_ids, read_at)

        await self._with_store(work)

    def _new(self, subject: str) -> NewSubjectKey:
        key = DataKey(f"s-{secrets.token_hex(8)}", secrets.token_bytes(KEY_BYTES))
        return NewSubjectKey(key.id, subject, wrap_key(self.master, key, subject))

    def _keep(self, found: Sequence[WrappedSubjectKey], asked: Sequence[str], read_at: float) -> None:
        keys = {each.id: self._opened(each) for each in found}
        with self._memory:
            for key_id in {*asked, *keys}:
                self._keys[key_id] = CachedKey(keys.get(key_id), read_at)
                self._keys.move_to_end(key_id)
            self._live |= {key.subject: key.id for key in keys.values() if key.destroyed_at is None}
            while len(self._keys) > CACHED_MAX:
                key_id, (oldest, _) = self._keys.popitem(last=False)
                if oldest is not None and self._live.get(oldest.subject) == key_id:
                    del self._live[oldest.subject]

    def _opened(self, each: WrappedSubjectKey) -> SubjectKey:
        if each.wrapped is None:
            return SubjectKey(each.id, each.subject, None, destroyed_at=each.destroyed_at)
        try:
            key = unwrap_key(self.master, each.id, each.wrapped, self.where, each.subject)
        except KeysUnavailable:
            # One key that was tampered with must not stop the others.
            return SubjectKey(each.id, each.subject, None, "it was changed, or belongs to another subject")
        problem = "" if key else f"its master key {master_of(each.wrapped)} is not in {self.master.where}"
        return SubjectKey(each.id, each.subject, key, problem)

    def _cached(self, key_id: str) -> CachedKey | None:
        with self._memory:
            cached = self._keys.get(key_id)
            if cached is None or not cached.is_fresh:
                return None
            self._keys.move_to_end(key_id)
            return cached

    def _live_key(self, subject: str) -> SubjectKey | None:
        """Return the live key of a subject, None if it is not in memory."""
        cached = self._cached(self._live.get(subject, ""))
        return None if cached is None or cached.found is None or cached.found.destroyed_at else cached.found

    async def _with_store(self, work: Callable[[SubjectKeyStore], Awaitable[T]]) -> T:
        """Work with the open store, one coroutine at a time. After an error the next one opens it again."""
        if self._process != os.getpid() or self._turn is None:
            # A forked child does not inherit the loop, and must not use the connection of its parent.
            self._process, self._turn, self._store = os.getpid(), asyncio.Lock(), None
        async with self._turn:
            if self._store is None:
                self._store = await self._opening()
                atexit.unregister(self._close_at_exit)
                atexit.register(self._close_at_exit)
            try:
                return await work(self._store)
            except BaseException:
                await self._close_store()
                raise

    def _close_at_exit(self) -> None:
        """Close the connection, whose tasks would complain at the end of the process."""
        # No thread can be started any more, which the store of a file would do.
        with suppress(RuntimeError):
            self.close()

    async def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await store.close()
