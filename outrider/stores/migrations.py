"""Migrations: numbered files of named steps. Each step commits together with its record, so a broken-off run resumes.

This module decides; the adapters execute. A recorded step whose text has changed since is refused, because nobody can
know what the table then looks like.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from outrider.errors import Misuse
from outrider.stores.queries import blocks, fill


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of a migration."""

    version: int
    migration: str
    name: str
    sql: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one migration has come."""

    version: int
    migration: str
    steps: int
    applied: int

    @property
    def state(self) -> str:
        """Return `applied`, `partial` or `pending`."""
        return "applied" if self.applied == self.steps else "partial" if self.applied else "pending"


def steps(package: str, constants: Mapping[str, str]) -> list[Step]:
    """Read every step of a store's `sql/migrations` folder, in order."""
    names = sorted(entry.name for entry in (files(package) / "sql/migrations").iterdir() if entry.name.endswith(".sql"))
    return [
        Step(int(filename[:4]), filename.removesuffix(".sql"), name, fill(body, constants), _checksum(body))
        for filename in names
        for name, body in blocks(package, f"sql/migrations/{filename}")
    ]


def _checksum(body: str) -> str:
    # Of the text as written: what is filled in, such as the number of lanes, may differ between installations.
    return hashlib.sha256(body.strip().encode()).hexdigest()[:16]


def pending(known: Iterable[Step], applied: Mapping[tuple[int, str], str]) -> list[Step]:
    """Return the steps still to run; `applied` maps (version, step) to the recorded checksum."""
    todo = []
    for step in known:
        recorded = applied.get((step.version, step.name))
        if recorded is None:
            todo.append(step)
        elif recorded != step.checksum:
            raise Misuse(
                f"migration {step.migration}, step {step.name}, was applied with another text ({recorded}, now "
                f"{step.checksum}); restore the file, or install the version of outrider that made this schema"
            )
    return todo


def progress(known: Iterable[Step], applied: Mapping[tuple[int, str], str]) -> list[Progress]:
    """Sum up each migration."""
    found: dict[int, list[Step]] = {}
    for step in known:
        found.setdefault(step.version, []).append(step)
    return [
        Progress(version, group[0].migration, len(group), sum((version, step.name) in applied for step in group))
        for version, group in sorted(found.items())
    ]
