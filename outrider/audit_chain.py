"""The audit chain: the hashes of audit lines, of the heads of chains, and of anchors.

Each run of a saga has a chain of its own, so chains never wait for each other. A line has a hash of the line before and
of its own columns. The details enter through a digest, so they can be removed later while the chain still verifies. The
first line is written by an application, in any driver, and has no stored hash: the second line covers it. The operation
log is one chain, see `outrider.operation_log`.

An anchor covers the heads of the chains whose sagas were removed together, or the lines that were removed from the
start of the operation log. Anchors are a chain too, and stay for ever.

Without a key, everyone who may write to the tables can compute these hashes. With `OUTRIDER_AUDIT_KEY`, only processes
that have the key can.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import NamedTuple
from uuid import UUID

from outrider.errors import InvalidSetting

KEY_VARIABLE = "OUTRIDER_AUDIT_KEY"
"""The variable with the secret keys, separated by commas: the first writes, and all verify."""

KEY_CHARACTERS_MIN = 16

SALT_BYTES = 8

STATE_BYTES = 16
"""The length of the hash of a state. A hash is compared with states, and protects nothing by itself."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

NOTHING = b""
"""The hash before the first line, and before the first anchor."""

Key = bytes | None
"""A key that may have written a hash; None stands for no key."""


class AuditLine(NamedTuple):
    """A stored line of the audit log.

    `place` orders the lines of a saga, and `line` is the number in the chain, from 1. `state_hash` is set in the last
    line of a turn, and so is `state`, as it is stored, if the turn has changed it. `digest` is set when the details
    were removed: `detail`, `state`, `state_hash` and `salt` are then empty.
    """

    saga_id: UUID
    place: int
    line: int
    at: datetime
    old_status: str | None
    new_status: str
    step: str | None
    what: str
    actor: str
    detail: str
    traceparent: str | None
    state_hash: bytes | None = None
    salt: bytes | None = None
    hash: bytes | None = None
    digest: bytes | None = None
    state: str | None = None


class AuditHead(NamedTuple):
    """The end of a chain: the number of lines and the hash of the last line.

    `anchor` is the number of the anchor that covers a removed saga, with `place` of its last line; None while the saga
    is there. `subject_hash` finds the chain of a removed saga when its subject is erased.
    """

    saga_id: UUID
    lines: int
    hash: bytes
    anchor: int | None = None
    place: int | None = None
    subject_hash: str | None = None


class AuditAnchor(NamedTuple):
    """An anchor: `close` covers the heads of removed sagas, and `prune` the removal of their lines.

    `covers` is the number of the `close` whose lines were removed, and `until` the latest change of the covered sagas.
    A `close` without chains covers the removal of lines from the start of the operation log: `lines` is the number of
    the last one that was removed, `digest` its hash, and `until` the latest time of the removed lines.
    """

    number: int
    at: datetime
    kind: str
    covers: int | None
    chains: int
    lines: int
    until: datetime
    digest: bytes
    hash: bytes = NOTHING


class AuditFinding(NamedTuple):
    """A fault in the audit log.

    `line` is the number in the chain of the saga, or in the operation log, and `anchor` the number of an anchor.
    """

    problem: str
    saga_id: UUID | None = None
    line: int | None = None
    anchor: int | None = None
    at: datetime | None = None
    log: str = "sagas"
    """The log of the line: `sagas` or `operations`."""


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """The rules of a verification."""

    keys: tuple[bytes, ...] = ()
    keyed_since: datetime | None = None
    """Lines before this time may have been written without a key."""
    expected: tuple[int, str] | None = None
    """The number and the hash of an anchor that was noted elsewhere."""

    def writers(self, hash_with: Callable[[Key], bytes], hash: bytes | None) -> list[Key]:
        """Return the keys that give a hash; the last of them is none at all."""
        return [key for key in (*self.keys, None) if hash_with(key) == hash]

    def lacks_key(self, at: datetime, key: Key) -> bool:
        """Tell whether a hash without a key is a finding."""
        return bool(self.keys) and key is None and (self.keyed_since is None or at >= self.keyed_since)

    def line_problem(self, at: datetime, writers: Sequence[Key], *, keyed: bool) -> str | None:
        """Return the problem of a line; `keyed` tells whether the line before was written with a key."""
        if not writers:
            return "the line, or the line before, was changed or forged"
        if keyed and writers[0] is None:
            return "the line has no key, and the line before has one: it was forged"
        return "the line was written without the key" if self.lacks_key(at, writers[0]) else None


@cache
def parse_keys(text: str) -> tuple[bytes, ...]:
    """Return the keys of a setting. A short key is rejected.

    >>> parse_keys("correct-horse-battery, a-former-key-of-ours")
    (b'correct-horse-battery', b'a-former-key-of-ours')
    """
    keys = tuple(key.strip().encode() for key in text.split(",") if key.strip())
    if any(len(key) < KEY_CHARACTERS_MIN for key in keys):
        raise InvalidSetting(
            f"a key of {KEY_VARIABLE} has less than {KEY_CHARACTERS_MIN} characters, and could be guessed; use a "
            "random one, as of `openssl rand -hex 32`"
        )
    return keys


def read_keys() -> tuple[bytes, ...]:
    """Return the keys of the environment; the first one writes."""
    return parse_keys(os.environ.get(KEY_VARIABLE, ""))


def state_hash_of(state: bytes) -> bytes:
    """Return the hash of a state, as stored.

    >>> state_hash_of(b"{}").hex()
    '44136fa355b3678a1146ad16f7e8649e'
    """
    return hashlib.sha256(state).digest()[:STATE_BYTES]


def digest_of(line: AuditLine) -> bytes:
    """Return the digest of the details: computed, or as kept when the details were removed.

    The salt is removed with the details, so that a guess at the details cannot be confirmed.
    """
    if line.digest is not None:
        return line.digest
    return details_digest(line.salt, line.detail, line.state_hash, has_state=line.state is not None)


def details_digest(
    salt: bytes | None, detail: str, state_hash: bytes | None = None, *, has_state: bool = False
) -> bytes:
    """Return the digest of the details of a line. A state is one of them, so that its removal is found."""
    kept = ("state",) if has_state else ()
    return hashlib.sha256(_text((_hex(salt), detail, _hex(state_hash), *kept))).digest()


def line_hash(before: bytes, line: AuditLine, key: Key = None) -> bytes:
    """Return the hash of a line after the hash of the line before."""
    facts = (
        *(str(line.saga_id), line.line, microseconds(line.at), line.old_status, line.new_status, line.step),
        *(line.what, line.actor, line.traceparent, _hex(digest_of(line))),
    )
    return hash_after(before, facts, key)


def first_line(saga_id: UUID, at: datetime, traceparent: str | None) -> AuditLine:
    """Return the first line of a saga, which every store writes at the start."""
    return AuditLine(saga_id, 0, 1, at, None, "started", None, "started", "application", "", traceparent)


def first_hash(saga_id: UUID, at: datetime, traceparent: str | None) -> bytes:
    """Return the hash of the first line, which needs no key: the second line covers it."""
    return line_hash(NOTHING, first_line(saga_id, at, traceparent))


def seal(lines: Iterable[AuditLine], before: bytes, state: bytes, *, keep_state: bool = False) -> list[AuditLine]:
    """Return the lines of one turn with their hashes; the last one has the hash of the state after the turn.

    With `keep_state` it has the state itself, too, which the hash covers.
    """
    keys, salt, sealed = read_keys(), secrets.token_bytes(SALT_BYTES), list(lines)
    for index, line in enumerate(sealed):
        known = state_hash_of(state) if index == len(sealed) - 1 else None
        kept = state.decode() if keep_state and known is not None else None
        salted = line._replace(salt=salt, state_hash=known, state=kept)
        before = line_hash(before, salted, keys[0] if keys else None)
        sealed[index] = salted._replace(hash=before)
    return sealed


def heads_digest(heads: Iterable[AuditHead]) -> bytes:
    """Return the digest of the heads that an anchor covers, in any order."""
    facts = sorted((str(head.saga_id), head.lines, _hex(head.hash)) for head in heads)
    return hashlib.sha256(_text(facts)).digest()


def anchor_hash(before: bytes, anchor: AuditAnchor, key: Key = None) -> bytes:
    """Return the hash of an anchor after the hash of the anchor before."""
    facts = (
        *(anchor.number, microseconds(anchor.at), anchor.kind, anchor.covers, anchor.chains, anchor.lines),
        *(microseconds(anchor.until), _hex(anchor.digest)),
    )
    return hash_after(before, facts, key)


def close_anchor(last: AuditAnchor | None, heads: Sequence[AuditHead], at: datetime, until: datetime) -> AuditAnchor:
    """Return the anchor of sagas that are removed now."""
    lines = sum(head.lines for head in heads)
    return _sealed(last, "close", None, len(heads), lines, until, heads_digest(heads), at)


def start_anchor(last: AuditAnchor | None, lines: int, hash: bytes, at: datetime, until: datetime) -> AuditAnchor:
    """Return the anchor of lines that are removed now from the start of the operation log."""
    return _sealed(last, "close", None, 0, lines, until, hash, at)


def prune_anchor(last: AuditAnchor, closed: AuditAnchor, at: datetime) -> AuditAnchor:
    """Return the anchor of lines that are removed now."""
    return _sealed(last, "prune", closed.number, closed.chains, closed.lines, closed.until, closed.digest, at)


def _sealed(  # noqa: PLR0917 - the columns of an anchor, in their order
    last: AuditAnchor | None,
    kind: str,
    covers: int | None,
    chains: int,
    lines: int,
    until: datetime,
    digest: bytes,
    at: datetime,
) -> AuditAnchor:
    keys, number = read_keys(), last.number + 1 if last else 1
    anchor = AuditAnchor(number, at, kind, covers, chains, lines, until, digest)
    return anchor._replace(hash=anchor_hash(last.hash if last else NOTHING, anchor, keys[0] if keys else None))


def hash_after(before: bytes, facts: Sequence[object], key: Key) -> bytes:
    """Return the hash of facts after the hash before: an HMAC if there is a key."""
    text = before + _text(facts)
    return hashlib.sha256(text).digest() if key is None else hmac.digest(key, text, "sha256")


def _text(facts: Sequence[object]) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode()


def _hex(part: bytes | None) -> str:
    return "" if part is None else part.hex()


def microseconds(moment: datetime) -> int:
    """Return a time as it enters a hash."""
    return (moment - EPOCH) // timedelta(microseconds=1)
