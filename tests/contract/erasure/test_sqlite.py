"""The contract of erasure on SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.testing.contracts.erasure import ErasureBench, ErasureContract
from tests.support.erasure_benches import sqlite_bench


class TestSqliteErasure(ErasureContract):
    @pytest.fixture
    async def bench(self, sqlite_path: Path) -> AsyncIterator[ErasureBench]:
        async with sqlite_bench(sqlite_path) as bench:
            yield bench
