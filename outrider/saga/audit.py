"""Verification of the audit log: every chain, and the anchors of the sagas that were removed.

Lines are read in pages, while workers write. A chain that does not fit at first is read again, whole and as of one
moment, so a saga that moves on during the verification is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from uuid import UUID

from outrider.audit_chain import (
    NOTHING,
    AuditAnchor,
    AuditCheck,
    AuditFinding,
    AuditHead,
    AuditLine,
    anchor_hash,
    heads_digest,
    line_hash,
    state_hash_of,
)
from outrider.saga.store import SagaAudit

__all__ = ["AuditCheck", "AuditFinding", "AuditReport", "chain_findings", "verify"]

PAGE_LINES = 1_000

MISSING_MAX = 1_000
"""The most sagas without any line that are reported."""

START = UUID(int=0), -1
"""The place before all lines."""


@dataclass(slots=True)
class AuditReport:
    """The result of a verification. `anchor` is the last anchor, to be noted where nobody here can change it."""

    lines: int = 0
    chains: int = 0
    anchors: int = 0
    without_details: int = 0
    anchor: AuditAnchor | None = None
    findings: list[AuditFinding] = field(default_factory=list)


async def verify(
    audit: SagaAudit, check: AuditCheck, progress: Callable[[AuditReport], None] = lambda _: None
) -> AuditReport:
    """Read the whole audit log in pages, and report each line that was changed, removed, forged or moved."""
    report = AuditReport()
    await _verify_anchors(audit, check, report)
    after, open_lines = START, list[AuditLine]()
    while page := await audit.lines(after, PAGE_LINES):
        after = page[-1].saga_id, page[-1].place
        open_lines += page
        # The last saga of a page may go on in the next one.
        last = page[-1].saga_id if len(page) == PAGE_LINES else None
        chains = {saga_id: list(lines) for saga_id, lines in groupby(open_lines, lambda line: line.saga_id)}
        open_lines = chains.pop(last, []) if last else []
        await _verify_chains(audit, check, report, chains)
        progress(report)
    if open_lines:
        await _verify_chains(audit, check, report, {open_lines[0].saga_id: open_lines})
    for saga_id in await audit.missing(MISSING_MAX):
        report.findings += await _chain_findings(audit, check, saga_id)
    return report


async def _verify_chains(
    audit: SagaAudit, check: AuditCheck, report: AuditReport, chains: dict[UUID, list[AuditLine]]
) -> None:
    if not chains:
        return
    by_saga = groupby(await audit.heads(list(chains)), lambda head: head.saga_id)
    heads = {saga_id: list(found) for saga_id, found in by_saga}
    for saga_id, lines in chains.items():
        report.chains += sum(line.line == 1 for line in lines)
        report.lines += len(lines)
        report.without_details += sum(line.digest is not None for line in lines)
        if any(chain_findings(heads.get(saga_id, []), lines, check)):
            report.findings += await _chain_findings(audit, check, saga_id)


async def _chain_findings(audit: SagaAudit, check: AuditCheck, saga_id: UUID) -> list[AuditFinding]:
    heads, lines = await audit.chain(saga_id)
    return list(chain_findings(heads, lines, check))


def chain_findings(heads: Sequence[AuditHead], lines: Sequence[AuditLine], check: AuditCheck) -> Iterator[AuditFinding]:
    """Compare the lines of a saga with each other and with the heads of its chains.

    A saga has a chain for each time that it was started: those of removed sagas come first.
    """
    runs = _runs(lines)
    for run in runs:
        yield from _run_findings(run, check)
    for head, run in zip(heads, runs, strict=False):
        yield from _head_findings(head, run)
    for head in heads[len(runs) :]:
        yield AuditFinding(f"all {head.lines} lines were removed", head.saga_id, 1, head.anchor)
    for run in runs[len(heads) :]:
        yield AuditFinding("the line belongs to no saga", run[0].saga_id, run[0].line, at=run[0].at)


def _runs(lines: Sequence[AuditLine]) -> list[list[AuditLine]]:
    runs: list[list[AuditLine]] = []
    for line in lines:
        if line.line == 1 or not runs:
            runs.append([])
        runs[-1].append(line)
    return runs


def _run_findings(run: Sequence[AuditLine], check: AuditCheck) -> Iterator[AuditFinding]:
    before, expected, keyed = NOTHING, 1, False
    for line in run:
        place = line.saga_id, line.line, None, line.at
        if line.line != expected:
            yield AuditFinding(f"line {expected} is missing, or a line was forged or moved", *place)
        elif line.line == 1:
            if line.hash is not None:
                yield AuditFinding("the first line has a hash: it was forged", *place)
        else:
            writers = check.writers(partial(line_hash, before, line), line.hash)
            if problem := check.line_problem(line.at, writers, keyed=keyed):
                yield AuditFinding(problem, *place)
            keyed = bool(writers) and writers[0] is not None
        if line.state is not None and state_hash_of(line.state.encode()) != line.state_hash:
            yield AuditFinding("the state of the line was changed, or is another", *place)
        if line.digest is not None and (line.detail or line.state or line.state_hash or line.salt):
            yield AuditFinding("the line has details, and the digest of removed details", *place)
        expected = line.line + 1
        before = line_hash(NOTHING, line) if line.line == 1 else line.hash or NOTHING


def _head_findings(head: AuditHead, run: Sequence[AuditLine]) -> Iterator[AuditFinding]:
    last = run[-1]
    if last.line < head.lines:
        problem = f"lines {last.line + 1} to {head.lines} were removed from the end"
        yield AuditFinding(problem, last.saga_id, last.line + 1, head.anchor)
    elif last.line > head.lines:
        problem = "the line was forged: its saga has not written it"
        yield AuditFinding(problem, last.saga_id, head.lines + 1, at=last.at)
    elif head.hash != (last.hash or line_hash(NOTHING, last)):
        yield AuditFinding("the line, or the head of the chain, was changed", last.saga_id, last.line, head.anchor)


async def _verify_anchors(audit: SagaAudit, check: AuditCheck, report: AuditReport) -> None:
    closed: dict[int, AuditAnchor] = {}
    while page := await audit.anchors(report.anchor.number if report.anchor else 0, PAGE_LINES):
        for anchor in page:
            report.findings += [each._replace(anchor=anchor.number) for each in _link(report.anchor, anchor, check)]
            report.anchor = anchor
            report.anchors += 1
            if anchor.kind == "close":
                # An anchor without chains covers the start of the operation log.
                closed |= {anchor.number: anchor} if anchor.chains else {}
            else:
                report.findings += _pruned(closed.pop(anchor.covers or 0, None), anchor)
    for anchor in closed.values():
        heads = await audit.anchor_heads(anchor.number)
        if heads is not None and (len(heads), heads_digest(heads)) != (anchor.chains, anchor.digest):
            problem = f"the heads of the {anchor.chains} chains that the anchor covers were changed or removed"
            report.findings.append(AuditFinding(problem, anchor=anchor.number, at=anchor.at))
    if check.expected:
        report.findings += await _expected(audit, *check.expected)


def _link(last: AuditAnchor | None, anchor: AuditAnchor, check: AuditCheck) -> Iterator[AuditFinding]:
    if anchor.number != (last.number + 1 if last else 1):
        yield AuditFinding("anchors before this one were removed", at=anchor.at)
        return
    before = last.hash if last else NOTHING
    writers = check.writers(partial(anchor_hash, before, anchor), anchor.hash)
    if not writers:
        yield AuditFinding("the anchor, or the anchor before, was changed or forged", at=anchor.at)
    elif check.lacks_key(anchor.at, writers[0]):
        yield AuditFinding("the anchor was written without the key", at=anchor.at)


def _pruned(closed: AuditAnchor | None, anchor: AuditAnchor) -> list[AuditFinding]:
    facts = closed and (closed.chains, closed.lines, closed.until, closed.digest)
    if facts == (anchor.chains, anchor.lines, anchor.until, anchor.digest):
        return []
    problem = f"the anchor records the removal of lines that anchor {anchor.covers} does not cover"
    return [AuditFinding(problem, anchor=anchor.number, at=anchor.at)]


async def _expected(audit: SagaAudit, number: int, hash: str) -> list[AuditFinding]:
    found = await audit.anchors(number - 1, 1)
    if found and (found[0].number, found[0].hash.hex()) == (number, hash):
        return []
    return [AuditFinding("the anchor that was noted elsewhere was changed or removed", anchor=number)]
