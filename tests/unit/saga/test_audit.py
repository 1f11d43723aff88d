"""The audit chain: changed, removed, forged and moved lines are found, and details can be removed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from outrider.audit_chain import AuditHead, AuditLine, digest_of, first_hash, first_line, parse_keys, read_keys, seal
from outrider.errors import InvalidSetting
from outrider.saga.audit import AuditCheck, chain_findings, verify
from outrider.saga.model import AuditCriteria, AuditEntry, SagaChange, Status
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.testing.saga_harness import claim_of, new_saga

SAGA = UUID(int=7)
AT = datetime(2026, 1, 31, tzinfo=UTC)
KEY = "correct-horse-battery"
Lines = list[AuditLine]


def _chain(count: int = 4) -> tuple[list[AuditHead], Lines]:
    first = first_line(SAGA, AT, "00-trace")
    facts = "running", "running", "pay", "done", "worker", "first attempt", None
    notes = [AuditLine(SAGA, place, place + 1, AT + timedelta(seconds=place), *facts) for place in range(1, count)]
    lines = [first, *seal(notes, first_hash(SAGA, AT, "00-trace"), b"{}")]
    return [AuditHead(SAGA, count, lines[-1].hash or b"")], lines


def _places(heads: list[AuditHead], lines: Lines, check: AuditCheck | None = None) -> list[int | None]:
    return [finding.line for finding in chain_findings(heads, lines, check or AuditCheck())]


def _without(number: int) -> Callable[[Lines], Lines]:
    return lambda lines: [line for line in lines if line.line != number]


def _changed(number: int, **columns: Any) -> Callable[[Lines], Lines]:
    return lambda lines: [line._replace(**columns) if line.line == number else line for line in lines]


CHANGES = [
    *({"at": AT}, {"old_status": "started"}, {"new_status": "failed"}, {"step": "ship"}, {"what": "failed"}),
    *({"actor": "ann"}, {"detail": "other"}, {"traceparent": "00"}, {"state_hash": b"x"}, {"salt": b"x"}),
    *({"hash": b"x" * 32}, {"digest": b"x"}, {"saga_id": UUID(int=8)}),
]


def test_an_untouched_chain_has_no_findings() -> None:
    assert _places(*_chain()) == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_change_of_any_column_names_the_line(change: dict[str, Any]) -> None:
    heads, lines = _chain()
    assert _places(heads, _changed(3, **change)(lines))[0] == 3


@pytest.mark.parametrize("change", [{"actor": "ann"}, {"at": AT + timedelta(1)}, {"hash": b"x" * 32}])
def test_a_change_of_the_first_line_is_found_by_the_second(change: dict[str, Any]) -> None:
    heads, lines = _chain()
    assert _places(heads, _changed(1, **change)(lines)) in ([2], [1])


def test_removed_lines_are_found_at_each_place() -> None:
    heads, lines = _chain()
    assert [_places(heads, _without(number)(lines)) for number in (1, 2, 3, 4)] == [[2], [3], [4], [4]]
    assert _places(heads, []) == [1]


def test_moved_and_forged_lines_are_found() -> None:
    heads, lines = _chain()
    assert _places(heads, [lines[0], lines[2], lines[1], lines[3]])[0] == 3
    forged = seal([lines[3]._replace(line=5)], lines[3].hash or b"", b"{}")
    assert _places(heads, lines + forged) == [5]
    assert _places([], lines) == [1]
    assert _places(heads, [*lines, first_line(SAGA, AT, None)]) == [1]


def test_a_forger_without_the_key_is_found_even_if_the_head_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, lines = _chain()
    check = AuditCheck(parse_keys(KEY))
    assert _places(heads, lines, check) == [2, 3, 4]
    assert _places(heads, lines, replace(check, keyed_since=AT + timedelta(1))) == []
    monkeypatch.setenv("OUTRIDER_AUDIT_KEY", KEY)
    keyed_heads, keyed = _chain()
    assert _places(keyed_heads, keyed, check) == []
    assert _places(keyed_heads, keyed) == [2, 3, 4]
    monkeypatch.setenv("OUTRIDER_AUDIT_KEY", f"another-key-of-this-shop,{KEY}")
    assert _places(keyed_heads, keyed, AuditCheck(read_keys())) == []
    monkeypatch.delenv("OUTRIDER_AUDIT_KEY")
    forged = seal([keyed[3]], keyed[2].hash or b"", b"{}")
    later = replace(check, keyed_since=AT + timedelta(1))
    assert _places([AuditHead(SAGA, 4, forged[0].hash or b"")], [*keyed[:3], *forged], later) == [4]


def test_a_short_key_is_rejected() -> None:
    with pytest.raises(InvalidSetting, match="could be guessed"):
        parse_keys("secret")


def test_details_can_be_removed_while_the_chain_still_verifies() -> None:
    heads, lines = _chain()
    digest = digest_of(lines[3])
    assert _places(heads, _changed(4, detail="", salt=None, state_hash=None, digest=digest)(lines)) == []
    assert _places(heads, _changed(4, detail="", salt=None, state_hash=None, digest=b"x" * 32)(lines)) == [4]
    assert _places(heads, _changed(4, digest=digest)(lines)) == [4]


async def test_a_verification_reads_pages_and_chains_that_go_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.saga.audit.PAGE_LINES", 3)
    sagas = MemorySagas(MemoryStore())
    note = AuditEntry(Status.STARTED, Status.RUNNING, None, "became running", "ann")
    async with sagas.transaction() as tx:
        for number in range(4):
            await sagas.start(tx, new_saga(f"A-{number}"))
    for record in await sagas.claim("w", [("order", 1)], limit=9, lease_seconds=9):
        async with sagas.transaction() as tx:
            await sagas.save(tx, claim_of(record), SagaChange(record.instance, notes=[note] * 4, at=record.now), 9)
    seen: list[int] = []
    report = await verify(sagas.audit, AuditCheck(), lambda report: seen.append(report.lines))
    assert (report.lines, report.chains, report.findings, len(seen)) == (20, 4, [], 7)
    found = await sagas.audit.find(AuditCriteria(actor="ann", saga_id=new_saga("A-1").saga_id, limit=3))
    assert [line.line for line in found] == [5, 4, 3]
