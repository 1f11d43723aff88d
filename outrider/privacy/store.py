"""The contract of the store of privacy: wrapped keys, of rings and of subjects, and all stored copies of payloads; and
the key ring in a store.

A key in the store is wrapped: encrypted with a master key, which is never in the store.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID

from outrider.background import Background
from outrider.errors import KeysUnavailable, OutriderError, UsageError
from outrider.privacy.encryption import open_bytes, parse_encrypted, seal_bytes
from outrider.privacy.keys import DataKey, KeyFacts, KeyRing, KeySet

ANSWER_SECONDS = 10.0
"""The longest wait for the database."""

T = TypeVar("T")


class WrappedKey(NamedTuple):
    """A key in a store. The key with the highest rank is active; without a rank a key only decrypts."""

    id: str
    wrapped: str
    rank: int | None
    created_at: datetime
    created_by: str
    activated_at: datetime | None
    activated_by: str | None


class CopyKind(StrEnum):
    """The kinds of stored copies of a payload, in the order in which an event passes through them."""

    EVENT = "event"
    DEAD_LETTER = "dead letter"
    HELD_EVENT = "held event"
    CONSUMER_DEAD_LETTER = "consumer dead letter"
    SAGA_MESSAGE = "saga message"
    SAGA_STATE = "saga state"
    SAGA_JOURNAL = "saga journal"
    PARTICIPANT_REPLY = "participant reply"
    ARCHIVED_EVENT = "archived event"


class PayloadCopy(NamedTuple):
    """A stored payload: the columns that identify it, the facts that its encryption needs, and its JSON text.

    A state has the id and the type of its saga in place of those of an event.
    """

    key: tuple[Any, ...]
    event_id: UUID
    event_type: str
    text: str | None
    """None for a body that is no text."""
    subject: str | None = None
    """The subject of the event or the saga; unknown for a message in the mailbox of a saga, which has no headers."""
    names: tuple[str, ...] = ()
    """The step and the phase of journal data; the participant, the key and the phase of a kept reply."""


class CopyPage(NamedTuple):
    """A page of copies in the order of a key, and the key after which the next page begins (None: no more)."""

    copies: Sequence[PayloadCopy]
    after: tuple[Any, ...] | None


class Rewrite(NamedTuple):
    """A copy and its new text. It is written only if the stored text is still that of the copy."""

    copy: PayloadCopy
    text: str


class WrappedSubjectKey(NamedTuple):
    """The key of a subject in a store. A destroyed key has no wrapped form, and a hash instead of its subject."""

    id: str
    subject: str
    wrapped: str | None
    created_at: datetime
    destroyed_at: datetime | None


class NewSubjectKey(NamedTuple):
    """A key to be inserted for a subject."""

    id: str
    subject: str
    wrapped: str


class SubjectKeyCounts(NamedTuple):
    """The numbers of keys in use, and of destroyed keys."""

    live: int
    destroyed: int


class SubjectKeyStore(Protocol):
    """The table of the keys of subjects. A subject has one live key at most, and any number of destroyed ones."""

    async def subject_keys(self, subjects: Sequence[str], key_ids: Sequence[str]) -> list[WrappedSubjectKey]:
        """Return the keys of these subjects, and those with these ids. A destroyed key has the `erased_name`."""
        ...

    async def insert_subject_keys(self, keys: Sequence[NewSubjectKey]) -> None:
        """Insert keys, and commit. A subject that has a live key keeps it."""
        ...

    async def destroy_subject_key(self, subject: str) -> list[str]:
        """Destroy the live key of a subject; return its id, empty without one. `erased_name` replaces the subject."""
        ...

    async def subject_key_page(self, after: str, limit: int) -> list[WrappedSubjectKey]:
        """Return the next live keys in the order of their ids."""
        ...

    async def rewrap_subject_keys(self, changes: Sequence[tuple[str, str, str]]) -> int:
        """Replace wrapped forms, given as (id, before, after), where the old one still stands; return their number."""
        ...

    async def count_subject_keys(self) -> SubjectKeyCounts:
        """Count all keys."""
        ...

    async def close(self) -> None:
        """Close connections and threads."""
        ...


class PrivacyStore(SubjectKeyStore, Protocol):
    """The tables of keys, and a reader and writer of all stored payloads.

    A change of a key of a ring leaves a line in the operation log, in the same transaction.
    """

    async def keys(self) -> list[WrappedKey]:
        """Return all keys."""
        ...

    async def insert_key(self, key_id: str, wrapped: str, actor: str) -> bool:
        """Insert a key, active if it is the first; return False, and change nothing, if the id is taken."""
        ...

    async def activate_key(self, key_id: str, actor: str) -> bool:
        """Give a key the highest rank; return False if there is none with this id."""
        ...

    async def rewrap_key(self, key_id: str, before: str, after: str, actor: str) -> bool:
        """Replace the wrapped form of a key, if it is still the given one."""
        ...

    async def copies(self, kind: CopyKind, after: tuple[Any, ...] | None, limit: int) -> CopyPage:
        """Return the next copies of a kind, at most `limit`."""
        ...

    async def rewrite(self, kind: CopyKind, rewrites: Sequence[Rewrite]) -> int:
        """Write new texts in one short transaction; return their number.

        A copy that has changed, moved, or is locked by its relay is left for a later pass: nothing waits here.
        """
        ...


_background = Background("outrider-keys")
"""A loop of its own: a ring is read by plain functions on any thread, the shared loop's included."""


class StoredKeys:
    """The keys in the table of a store, as a source. Make a ring with `outrider.app.stored_keys`.

    Without any master key the source holds no keys, so that a relay runs without secrets::

        keys = stored_keys("postgresql://localhost/shop", master=KeyRing.from_environment("SHOP_MASTER_KEYS"))
    """

    def __init__(self, opening: Callable[[], Awaitable[PrivacyStore]], where: str, master: KeyRing) -> None:
        self._opening, self.master = opening, master
        self.where = f"the table of keys in {where}, opened with the master keys of {master.where},"

    def read(self) -> KeySet:
        if self.master.active() is None:
            return KeySet({}, None)
        try:
            found = _background.run(self._with_store(lambda store: store.keys())).result(ANSWER_SECONDS)
        except (OutriderError, TimeoutError) as error:
            raise KeysUnavailable(f"{self.where} cannot be read ({str(error) or 'no answer'})") from error
        opened = {each.id: unwrap_key(self.master, each.id, each.wrapped, self.where) for each in found}
        keys = {key_id: key for key_id, key in opened.items() if key is not None}
        return KeySet(keys, _active(found, keys))

    async def facts(self) -> list[KeyFacts]:
        found = await self._with_store(lambda store: store.keys())
        active = _active(found, {each.id: each for each in found})
        rows = [KeyFacts(each.id, each.id == active, *each[3:], master_of(each.wrapped)) for each in found]
        return sorted(rows, key=lambda row: (not row.active, row.created_at, row.id))

    async def add(self, key: DataKey, actor: str) -> bool:
        wrapped = wrap_key(self.master, key)
        return await self._with_store(lambda store: store.insert_key(key.id, wrapped, actor))

    async def activate(self, key_id: str, actor: str) -> bool:
        return await self._with_store(lambda store: store.activate_key(key_id, actor))

    async def rewrap(self, actor: str) -> int:
        """Wrap all keys with the active master key; return the number of keys that had another one."""
        master = active_master(self.master)

        async def work(store: PrivacyStore) -> int:
            done = 0
            for each in await store.keys():
                if master_of(each.wrapped) != master.id:
                    key = required_key(self.master, each.id, each.wrapped, self.where)
                    done += await store.rewrap_key(each.id, each.wrapped, wrap_key(self.master, key), actor)
            return done

        return await self._with_store(work)

    async def _with_store(self, work: Callable[[PrivacyStore], Awaitable[T]]) -> T:
        store = await self._opening()
        try:
            return await work(store)
        finally:
            await store.close()


def _active(found: Sequence[WrappedKey], known: Mapping[str, object]) -> str | None:
    """Return the key of the highest rank. A key that does not open must not be replaced by an older one in silence."""
    ranked = [each for each in found if each.rank is not None]
    if not ranked:
        return None
    first = max(ranked, key=lambda each: (each.rank, each.id))
    return first.id if first.id in known else None


def active_master(master: KeyRing) -> DataKey:
    """Return the master key that wraps."""
    if (key := master.active()) is None:
        raise UsageError(f"{master.where} has no master key; make one with: outrider keys new")
    return key


def master_of(wrapped: str) -> str:
    """Return the id of the master key that wraps a key."""
    return str(json.loads(wrapped).get("key"))


def wrap_key(master: KeyRing, key: DataKey, *owner: str) -> str:
    """Return the wrapped form of a key. It is bound to the id, and to the owner if the key has one."""
    wrapping = active_master(master)
    return json.dumps(seal_bytes(wrapping, key.secret, _about(wrapping.id, key.id, *owner)).to_json())


def unwrap_key(master: KeyRing, key_id: str, wrapped: str, where: str, *owner: str) -> DataKey | None:
    """Return a key, None if its master key is not here. Raises KeysUnavailable if the wrapped form was changed."""
    sealed = parse_encrypted(json.loads(wrapped))
    wrapping = None if sealed is None else master.find(sealed.key_id)
    if sealed is None or wrapping is None:
        return None
    secret = open_bytes(wrapping, sealed, _about(wrapping.id, key_id, *owner))
    if secret is None:
        raise KeysUnavailable(f"{where} cannot be read: the key {key_id} was changed, or is of another ring")
    return DataKey(key_id, secret)


def required_key(master: KeyRing, key_id: str, wrapped: str, where: str, *owner: str) -> DataKey:
    """Return a key whose master key must be here."""
    if (key := unwrap_key(master, key_id, wrapped, where, *owner)) is None:
        raise UsageError(
            f"the key {key_id} is wrapped with the master key {master_of(wrapped)}, which {master.where} does not "
            "have; add it there"
        )
    return key


def _about(master_id: str, key_id: str, *owner: str) -> bytes:
    return json.dumps(["outrider key", 1, master_id, key_id, *owner]).encode()
