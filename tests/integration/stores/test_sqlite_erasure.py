"""Erasure on SQLite: the gate of the audit log."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from outrider.audit_chain import digest_of
from outrider.event import subject_hash
from outrider.saga.audit import AuditCheck, verify
from outrider.testing.contracts.erasure import ANN
from tests.support.erasure_benches import sqlite_bench

LINE = "UPDATE saga_audit_log SET {change} WHERE line = 2"

WHOLE = "detail = '', state_hash = NULL, salt = NULL, digest = X'{digest}'"

OTHERS = (
    "actor = 'nobody'",
    "hash = NULL",
    "saga_id = 'x'",
    "what = 'x'",
    "line = 9",
    "at = 0",
    "new_status = 'failed'",
)


async def test_only_details_can_be_replaced_by_a_digest_and_only_while_a_run_is_open(sqlite_path: Path) -> None:
    async with sqlite_bench(sqlite_path) as bench:
        saga_id = await bench.end_saga("A-7", ANN)
        _, lines = await bench.sagas.audit.chain(saga_id)
        right = WHOLE.format(digest=digest_of(lines[1]).hex())
        with closing(sqlite3.connect(sqlite_path, isolation_level=None)) as conn:
            with pytest.raises(sqlite3.IntegrityError, match="append only"):
                conn.execute(LINE.format(change=right))
            await bench.erasure.open_run(subject_hash(ANN), "ann")
            changes = (
                "detail = ''",
                "digest = X'00'",
                WHOLE.format(digest="00"),
                *(f"{right}, {each}" for each in OTHERS),
            )
            for change in changes:
                with pytest.raises(sqlite3.IntegrityError, match="append only"):
                    conn.execute(LINE.format(change=change))
            conn.execute(LINE.format(change=right))
            assert (await verify(bench.sagas.audit, AuditCheck())).findings == []
            with pytest.raises(sqlite3.IntegrityError, match="append only"):
                conn.execute(LINE.format(change=WHOLE.format(digest="11" * 32)))
