"""The contract of erasure on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outrider.testing.contracts.erasure import ErasureBench, ErasureContract
from tests.support.erasure_benches import postgres_bench


@pytest.mark.postgres
class TestPostgresErasure(ErasureContract):
    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[ErasureBench]:
        async with postgres_bench(postgres_url) as bench:
            yield bench
