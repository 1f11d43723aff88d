"""The contract of erasure on MongoDB."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outrider.testing.contracts.erasure import ErasureBench, ErasureContract
from tests.support.erasure_benches import mongo_bench


@pytest.mark.mongo
class TestMongoErasure(ErasureContract):
    @pytest.fixture
    async def bench(self, mongo_default: str) -> AsyncIterator[ErasureBench]:
        async with mongo_bench(mongo_default) as bench:
            yield bench
