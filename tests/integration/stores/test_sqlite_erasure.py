"""Erasure on SQLite: the gate of the audit log."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from outrider.audit_chain import digest_of
from outrider.event import subject_hash
from outrider.saga.audit import AuditCheck, verify
from outrider.testing.contracts.erasure import ANN, CANARY
from tests.support.erasure_benches import sqlite_bench

LINE = "UPDATE saga_audit_log SET {change} WHERE line = 2"

INSERT = "INSERT INTO outbox (event_type, topic, payload, headers) VALUES ('t', 'orders', ?, ?)"

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


async def test_a_subject_is_found_in_every_spelling_of_json(sqlite_path: Path) -> None:
    spellings = """{"subject": "customer\\u003a42"}""", """{"subj\\u0065ct" : "customer:42"}"""
    async with sqlite_bench(sqlite_path) as bench:
        with closing(sqlite3.connect(sqlite_path, isolation_level=None)) as conn:
            for headers in spellings:
                row = f'{{"email": "{CANARY}"}}', headers
                conn.execute(INSERT, row)
        assert len((await bench.run("customer:42").run())[0].blocking) == len(spellings)
        await bench.publish()
        [result] = await bench.run("customer:42").run()
        assert result.is_complete
        assert await bench.readable(CANARY) == []
