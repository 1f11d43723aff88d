"""The contract of the store of privacy: wrapped keys, and all stored copies of payloads; and the key ring in a store.

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
    ARCHIVED_EVENT = "archived event"


class PayloadCopy(NamedTuple):
    """A stored payload: the columns that identify it, the facts that its encryption needs, and its JSON text."""

    key: tuple[Any, ...]
    event_id: UUID
    event_type: str
    text: str | None
    """None for a body that is no text."""


class CopyPage(NamedTuple):
    """A page of copies in the order of a key, and the key after which the next page begins (None: no more)."""

    copies: Sequence[PayloadCopy]
    after: tuple[Any, ...] | None


class Rewrite(NamedTuple):
    """A copy and its new text. It is written only if the stored text is still that of the copy."""

    copy: PayloadCopy
    text: str


class PrivacyStore(Protocol):
    """The table of keys, and a reader and writer of all stored payloads.

    A change of a key leaves a line in the operation log, in the same transaction.
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

    async def close(self) -> None:
        """Close connections and threads."""
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
        opened = {each.id: self._unwrap(each) for each in found}
        keys = {key_id: key for key_id, key in opened.items() if key is not None}
        return KeySet(keys, _active(found, keys))

    async def facts(self) -> list[KeyFacts]:
        found = await self._with_store(lambda store: store.keys())
        active = _active(found, {each.id: each for each in found})
        rows = [KeyFacts(each.id, each.id == active, *each[3:], _master_of(each.wrapped)) for each in found]
        return sorted(rows, key=lambda row: (not row.active, row.created_at, row.id))

    async def add(self, key: DataKey, actor: str) -> bool:
        wrapped = self._wrap(key)
        return await self._with_store(lambda store: store.insert_key(key.id, wrapped, actor))

    async def activate(self, key_id: str, actor: str) -> bool:
        return await self._with_store(lambda store: store.activate_key(key_id, actor))

    async def rewrap(self, actor: str) -> int:
        """Wrap all keys with the active master key; return the number of keys that had another one."""
        master = self._master()

        async def work(store: PrivacyStore) -> int:
            done = 0
            for each in await store.keys():
                if _master_of(each.wrapped) != master.id:
                    if (key := self._unwrap(each)) is None:
                        raise UsageError(
                            f"the key {each.id} is wrapped with the master key {_master_of(each.wrapped)}, which "
                            f"{self.master.where} does not have; add it there"
                        )
                    done += await store.rewrap_key(each.id, each.wrapped, self._wrap(key), actor)
            return done

        return await self._with_store(work)

    def _master(self) -> DataKey:
        if (master := self.master.active()) is None:
            raise UsageError(f"{self.master.where} has no master key; make one with: outrider keys new")
        return master

    def _wrap(self, key: DataKey) -> str:
        master = self._master()
        return json.dumps(seal_bytes(master, key.secret, _about(master.id, key.id)).to_json())

    def _unwrap(self, each: WrappedKey) -> DataKey | None:
        """Return a key, None if its master key is not here."""
        sealed = parse_encrypted(json.loads(each.wrapped))
        master = None if sealed is None else self.master.find(sealed.key_id)
        if sealed is None or master is None:
            return None
        secret = open_bytes(master, sealed, _about(master.id, each.id))
        if secret is None:
            raise KeysUnavailable(f"{self.where} cannot be read: the key {each.id} was changed, or is of another ring")
        return DataKey(each.id, secret)

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


def _master_of(wrapped: str) -> str:
    return str(json.loads(wrapped).get("key"))


def _about(master_id: str, key_id: str) -> bytes:
    return json.dumps(["outrider key", 1, master_id, key_id]).encode()
