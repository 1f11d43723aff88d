"""The memory store's sagas: tables whose writes wait for their transaction to commit.

A transaction sees its own writes: they are done to a copy of the row. A rollback, whole or to a savepoint, forgets
them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar
from uuid import UUID

from outrider.saga_store import Entry, Instance, Mail, Phase, Status

DEAF = frozenset({Status.COMPLETED, Status.COMPENSATED})
"""A saga in these reads no mail."""

Line = tuple[str, Phase]
"""What names a line of the journal."""


class Copied(Protocol):
    """A row that can be copied."""

    def copy(self) -> Self:
        """Return a row that can be changed without changing this one."""
        ...


class Writing(Protocol):
    """A transaction, as far as tables know it."""

    on_commit: list[Callable[[], None]]


K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Copied)


class Table(Generic[K, R]):
    """Rows by their keys. A row that was never written is an empty one."""

    def __init__(self, empty: Callable[[], R]) -> None:
        self.rows: dict[K, R] = {}
        self.empty = empty

    def seen_by(self, tx: Writing, key: K) -> R:
        """Return a row as the transaction sees it."""
        row = self.rows[key].copy() if key in self.rows else self.empty()
        for write in tx.on_commit:
            if isinstance(write, Write) and write.table is self and write.key == key:
                write.change(row)
        return row

    def write(self, tx: Writing, key: K, change: Callable[[R], None]) -> None:
        """Change a row when the transaction commits."""
        tx.on_commit.append(Write(self, key, change))


@dataclass(frozen=True, slots=True)
class Write(Generic[K, R]):
    """A change that waits for its transaction."""

    table: Table[K, R]
    key: K
    change: Callable[[R], None]

    def __call__(self) -> None:
        self.change(self.table.rows.setdefault(self.key, self.table.empty()))


@dataclass(slots=True)
class SagaRow:
    """All there is of one saga. Its trail outlives the instance."""

    instance: Instance | None = None
    journal: dict[Line, Entry] = field(default_factory=dict)
    mail: dict[int, Mail] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    trail: list[dict[str, Any]] = field(default_factory=list)

    def copy(self) -> SagaRow:
        return SagaRow(self.instance, dict(self.journal), dict(self.mail), set(self.seen), list(self.trail))

    @property
    def listens(self) -> bool:
        """Tell whether mail would be read."""
        return self.instance is not None and self.instance.status not in DEAF

    @property
    def unseen(self) -> list[Mail]:
        """Return the mail that wakes somebody, as it came."""
        return [piece for mail_id, piece in sorted(self.mail.items()) if mail_id not in self.seen]


class Passage(NamedTuple):
    """A command that came to a participant, and what was answered."""

    barred: bool
    at: datetime
    reply: bytes | None = None


Passages = dict[Phase, Passage]


class SagaTables:
    """Everything the memory store holds of sagas."""

    def __init__(self) -> None:
        self.sagas: Table[UUID, SagaRow] = Table(SagaRow)
        self.names: Table[tuple[str, str], set[UUID]] = Table(set)
        self.barriers: Table[tuple[str, str], Passages] = Table(dict)
        self.listeners: list[Callable[[], None]] = []
        self._number = 0

    def next_number(self) -> int:
        """Take the next number of a piece of mail; gaps are harmless."""
        self._number += 1
        return self._number

    def living(self) -> Iterator[tuple[SagaRow, Instance]]:
        """Return all instances, each with its row."""
        return ((row, row.instance) for row in self.sagas.rows.values() if row.instance)

    def prune_barriers(self, before: datetime) -> int:
        """Forget what participants answered before; return how many commands that were."""
        removed = 0
        for key, passages in list(self.barriers.rows.items()):
            old = [phase for phase, passage in passages.items() if passage.at < before]
            for phase in old:
                del passages[phase]
            removed += len(old)
            if not passages:
                del self.barriers.rows[key]
        return removed

    def wake(self) -> None:
        """Tell workers that something may have arrived."""
        for wake in self.listeners:
            wake()
