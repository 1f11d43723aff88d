"""The key rings of the contract."""

from __future__ import annotations

import pytest

from outrider.privacy import DataKey, KeyRing
from tests.support.key_rings import ListedKeys


@pytest.fixture
def keys() -> KeyRing:
    return KeyRing(ListedKeys(DataKey.new("first")))


@pytest.fixture
def rings() -> tuple[KeyRing, KeyRing]:
    """A ring, and the ring after a rotation."""
    old, new = DataKey.new("old"), DataKey.new("new")
    return KeyRing(ListedKeys(old)), KeyRing(ListedKeys(new, old))
