"""Sources of keys for tests."""

from __future__ import annotations

from outrider.privacy.keys import DataKey, KeyFacts, KeySet, facts_of


class ListedKeys:
    """A source over a list of keys, the active one first, which may fail, and counts its readings."""

    where = "the list"

    def __init__(self, *keys: DataKey) -> None:
        self.keys = list(keys)
        self.error: Exception | None = None
        self.readings = 0

    def read(self) -> KeySet:
        self.readings += 1
        if self.error is not None:
            raise self.error
        return KeySet({key.id: key for key in self.keys}, self.keys[0].id if self.keys else None)

    async def facts(self) -> list[KeyFacts]:
        return facts_of(self.read())

    async def add(self, key: DataKey, actor: str) -> bool:
        self.keys.append(key)
        return True

    async def activate(self, key_id: str, actor: str) -> bool:
        self.keys.sort(key=lambda key: key.id != key_id)
        return True
