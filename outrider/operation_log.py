"""The operation log: a line for each command of an operator, and for each dead letter whose retention was over.

All lines of a store are one chain, because such commands are rare. A command locks the head of the chain last, writes
its lines in one statement, and commits. The head has the number of lines and the hash of the last one. Lines from
before the chain have no number, and the head has their count.

Old lines are removed from the start of the chain, by whole days, so there is about one anchor for each day. An anchor
has the number and the hash of the last line that was removed, where the rest of the chain begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from outrider.audit_chain import (
    NOTHING,
    SALT_BYTES,
    AuditAnchor,
    AuditCheck,
    AuditFinding,
    Key,
    details_digest,
    hash_after,
    microseconds,
    read_keys,
    start_anchor,
)
from outrider.event import TRACEPARENT

TRACE_VARIABLE = "TRACEPARENT"
"""The variable with the trace in which a command runs."""

PAGE_LINES = 1_000

LINES_MAX = 2_000
"""The most lines that are removed together."""

READS_MAX = 5
"""The most verifications of the log while others remove lines from its start."""


class OperationLine(NamedTuple):
    """A line of the operation log.

    `line` is the number in the chain, from 1; None for a line from before the chain. `place` orders the lines that have
    the same number. `detail` is JSON; `digest` is set when it was removed, and `salt` is then empty.
    """

    at: datetime
    actor: str
    verb: str
    event_id: UUID | None = None
    consumer: str | None = None
    detail: str = ""
    traceparent: str | None = None
    line: int | None = None
    place: Any = None
    salt: bytes | None = None
    hash: bytes | None = None
    digest: bytes | None = None


class OperationHead(NamedTuple):
    """The end of the chain: the number of lines, the hash of the last one, and the count of lines from before it."""

    lines: int = 0
    hash: bytes = NOTHING
    unchained: int = 0


class OperationEnd(NamedTuple):
    """The last lines of the log, as of one moment, with the head (None: removed) and the count of unnumbered lines."""

    head: OperationHead | None
    unchained: int
    lines: Sequence[OperationLine]


class OperationCriteria(NamedTuple):
    """A filter for lines; all given fields must match."""

    event_id: UUID | None = None
    actor: str | None = None
    since: datetime | None = None
    limit: int = 50


class OperationLog(Protocol):
    """The operation log of a store."""

    async def find(self, criteria: OperationCriteria) -> list[OperationLine]:
        """List lines, the latest first."""
        ...

    async def record(self, actor: str, verb: str, **detail: Any) -> None:
        """Write the line of a command that changes no other row of the store."""
        ...

    async def lines(self, after: tuple[int, Any] | None, limit: int) -> list[OperationLine]:
        """Return a page of the lines with a number, in the order of number and place."""
        ...

    async def end(self, after: tuple[int, Any] | None) -> OperationEnd:
        """Return all later lines and the head, as of one moment."""
        ...

    async def last_anchor(self) -> AuditAnchor | None:
        """Return the last anchor of removed lines."""
        ...

    async def remove_lines(self, days: float) -> int:
        """Remove the lines of the days before, and leave anchors; return the number of lines."""
        ...


def read_trace() -> str | None:
    """Return the trace of the environment, unless it is invalid."""
    trace = os.environ.get(TRACE_VARIABLE, "")
    return trace if TRACEPARENT.fullmatch(trace) else None


def lines_of(
    at: datetime,
    actor: str,
    verb: str,
    events: Iterable[tuple[UUID | None, str | None]] = ((None, None),),
    **detail: Any,
) -> list[OperationLine]:
    """Return the lines of a command, one for each event and consumer; `detail` names the object, without its content.

    >>> [line.detail for line in lines_of(datetime(2030, 1, 31), "ann", "key_add", key="k1")]
    ['{"key": "k1"}']
    """
    text, trace = json.dumps(detail, sort_keys=True) if detail else "", read_trace()
    return [OperationLine(at, actor, verb, event_id, consumer, text, trace) for event_id, consumer in events]


def content_digest(content: str | bytes) -> str:
    """Return the digest of a payload, which stands for the payload in details.

    >>> content_digest("{}")[:8]
    '44136fa3'
    """
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def digest_of(line: OperationLine) -> bytes:
    """Return the digest of the details: computed, or as kept when the details were removed."""
    return details_digest(line.salt, line.detail) if line.digest is None else line.digest


def operation_hash(before: bytes, line: OperationLine, key: Key = None) -> bytes:
    """Return the hash of a line after the hash of the line before."""
    facts = (
        *(line.line, microseconds(line.at), line.actor, line.verb, line.event_id and str(line.event_id)),
        *(line.consumer, line.traceparent, digest_of(line).hex()),
    )
    return hash_after(before, facts, key)


def seal_operations(head: OperationHead, lines: Iterable[OperationLine]) -> tuple[OperationHead, list[OperationLine]]:
    """Return the lines of one command with their numbers and hashes, and the head after them."""
    keys, salt, sealed = read_keys(), secrets.token_bytes(SALT_BYTES), []
    for number, line in enumerate(lines, head.lines + 1):
        numbered = line._replace(line=number, salt=salt)
        head = head._replace(lines=number, hash=operation_hash(head.hash, numbered, keys[0] if keys else None))
        sealed.append(numbered._replace(hash=head.hash))
    return head, sealed


def oldest_kept(now: datetime, days: float) -> datetime:
    """Return the time before which lines are removed: the start of a day.

    >>> oldest_kept(datetime(2030, 1, 31, 12), 1).isoformat()
    '2030-01-30T00:00:00'
    """
    return (now - timedelta(days=days)).replace(hour=0, minute=0, second=0, microsecond=0)


def removable(before: datetime, former: AuditAnchor | None, oldest: Iterable[OperationLine]) -> list[OperationLine]:
    """Return the lines that are old, of the oldest lines: all with a number, or all without.

    The lines end where a number is missing or forged, so that no such place is ever covered by an anchor. `former` is
    the last anchor of the operation log.
    """
    found: list[OperationLine] = []
    number = former.lines if former else 0
    for line in oldest:
        number += line.line is not None
        if line.at >= before or line.line not in (None, number):
            break
        found.append(line)
    return found


def anchor_of_removed(
    last: AuditAnchor | None, former: AuditAnchor | None, removed: Sequence[OperationLine], now: datetime
) -> AuditAnchor:
    """Return the anchor of lines that are removed now; `last` is the last anchor of all."""
    line = removed[-1]
    start = (former.lines, former.digest) if former else (0, NOTHING)
    number, hash = start if line.line is None or line.hash is None else (line.line, line.hash)
    return start_anchor(last, number, hash, now, max(each.at for each in removed))


@dataclass(slots=True)
class OperationReport:
    """The result of a verification. `unchained` counts the lines from before the chain."""

    lines: int = 0
    unchained: int = 0
    without_details: int = 0
    findings: list[AuditFinding] = field(default_factory=list)


async def verify_operations(
    log: OperationLog, check: AuditCheck, progress: Callable[[OperationReport], None] = lambda _: None
) -> OperationReport:
    """Read the whole operation log in pages, and report each line that was changed, removed, forged or moved.

    Commands may write meanwhile. If others remove lines from the start meanwhile, the log is read again.
    """
    report = OperationReport()
    for _ in range(READS_MAX):
        anchor = await log.last_anchor()
        report = await _read(log, _Chain(check, anchor), progress)
        if not report.findings or await log.last_anchor() == anchor:
            break
    return report


async def _read(log: OperationLog, chain: _Chain, progress: Callable[[OperationReport], None]) -> OperationReport:
    after: tuple[int, Any] | None = None
    while len(page := await log.lines(after, PAGE_LINES)) == PAGE_LINES:
        after = page[-1].line or 0, page[-1].place
        for line in page:
            chain.add(line)
        progress(chain.report)
    end = await log.end(after)
    for line in end.lines:
        chain.add(line)
    chain.finish(end)
    return chain.report


class _Chain:
    """The chain as far as it was read."""

    def __init__(self, check: AuditCheck, anchor: AuditAnchor | None) -> None:
        self._check, self.report = check, OperationReport()
        self._number, self._hash = (anchor.lines, anchor.digest) if anchor else (0, NOTHING)
        self._keyed = False

    def add(self, line: OperationLine) -> None:
        self.report.lines += 1
        self.report.without_details += line.digest is not None
        if line.line != self._number + 1:
            self._find(f"line {self._number + 1} is missing, or a line was forged or moved", line)
        else:
            writers = self._check.writers(partial(operation_hash, self._hash, line), line.hash)
            if problem := self._check.line_problem(line.at, writers, keyed=self._keyed):
                self._find(problem, line)
            self._keyed = bool(writers) and writers[0] is not None
        if line.digest is not None and (line.detail or line.salt):
            self._find("the line has details, and the digest of removed details", line)
        self._number, self._hash = line.line or 0, line.hash or NOTHING

    def finish(self, end: OperationEnd) -> None:
        self.report.unchained = end.unchained
        if end.head is None:
            self._find("the head of the operation log was removed")
            return
        lines, hash, unchained = end.head
        if self._number < lines:
            self._find(f"lines {self._number + 1} to {lines} were removed from the end", number=self._number + 1)
        elif self._number > lines:
            self._find("the line was forged: no command has written it", number=lines + 1)
        elif self._hash != hash:
            self._find("the line, or the head of the chain, was changed", number=lines)
        if end.unchained != unchained:
            self._find(f"{end.unchained} lines have no number, and {unchained} are from before the chain")

    def _find(self, problem: str, line: OperationLine | None = None, *, number: int | None = None) -> None:
        place = (number, None) if line is None else (line.line, line.at)
        self.report.findings.append(AuditFinding(problem, line=place[0], at=place[1], log="operations"))
