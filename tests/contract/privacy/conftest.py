"""The key ring of the contract."""

from __future__ import annotations

import pytest

from outrider.privacy import DataKey, KeyRing
from tests.support.key_rings import ListedKeys


@pytest.fixture
def keys() -> KeyRing:
    return KeyRing(ListedKeys(DataKey.new("first")))
