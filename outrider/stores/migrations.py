"""Migrations: numbered files of named steps. A step and its record commit together, so an interrupted run resumes.

This module decides; the adapters execute. A recorded step with a changed text is rejected, because the present form of
the table is then unknown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol, TypeVar

from outrider.errors import InvalidSetting, UsageError
from outrider.stores.queries import blocks, fill
from outrider.stores.statements import run_statements

T = TypeVar("T")

Rows = Sequence[Sequence[Any]]

Statements = Generator[str, Rows, T]
"""A generator that yields SQL texts, receives their rows and returns a result."""

LANES_DEFAULT, LANES_MAX = 32, 1024

SCHEMA_VERSION = 1
"""The version of the tables that this code was written for. The tables record their own version, which the last step of
a migration raises, and `code_min`, the version that code must know, which the first step raises if older code would do
harm."""

SCHEMA_VERSION_MIN = 1
"""The lowest version of the tables that this code works with."""

LATER = {name: f"{{{name}}}" for name in ("version", "step", "checksum")}
"""Constants that are filled in for each step and stay as placeholders until then."""

_END = re.compile(r";\s*?(?:\n(?=\S)|\Z)")
"""The end of a statement among several: the next starts in the first column. A trigger has semicolons of its own."""

_UNFINISHED = {
    "outbox": "events are not delivered or are dead letters",
    "inbox": "events wait at consumers or are their dead letters",
    "saga": "sagas are under way or need a person",
    "payload": "schemas are in use",
    "privacy": "keys may be in use",
    "subject": "keys of subjects may be in use",
    "erasure": "erasures are recorded",
    "journal": "entries are needed",
    "audit_state": "states are needed",
}


@dataclass(frozen=True, slots=True)
class MigrationStep:
    """One statement of a migration."""

    version: int
    migration: str
    name: str
    sql: str
    checksum: str


@dataclass(frozen=True, slots=True)
class MigrationProgress:
    """The progress of one migration."""

    version: int
    migration: str
    steps: int
    applied: int

    @property
    def state(self) -> str:
        """Return `applied`, `partial` or `pending`."""
        return "applied" if self.applied == self.steps else "partial" if self.applied else "pending"


def steps(package: str, constants: Mapping[str, str]) -> list[MigrationStep]:
    """Read every step of a store's `sql/migrations` folder, in order."""
    names = sorted(entry.name for entry in (files(package) / "sql/migrations").iterdir() if entry.name.endswith(".sql"))
    return [
        MigrationStep(int(filename[:4]), filename.removesuffix(".sql"), name, fill(body, constants), _checksum(body))
        for filename in names
        for _, name, body in blocks(package, f"sql/migrations/{filename}")
    ]


def _checksum(body: str) -> str:
    # The checksum of the text as written: constants such as the number of lanes may differ between installations.
    return hashlib.sha256(body.strip().encode()).hexdigest()[:16]


def pending(known: Iterable[MigrationStep], applied: Mapping[tuple[int, str], str]) -> list[MigrationStep]:
    """Return the steps still to run; `applied` maps (version, step) to the recorded checksum."""
    todo = []
    for step in known:
        recorded = applied.get((step.version, step.name))
        if recorded is None:
            todo.append(step)
        elif recorded != step.checksum:
            raise UsageError(
                f"migration {step.migration}, step {step.name}, was applied with another text ({recorded}, now "
                f"{step.checksum}); restore the file, or install the version of outrider that made this schema"
            )
    return todo


def progress(known: Iterable[MigrationStep], applied: Mapping[tuple[int, str], str]) -> list[MigrationProgress]:
    """Return the progress of each migration."""
    found: dict[int, list[MigrationStep]] = {}
    for step in known:
        found.setdefault(step.version, []).append(step)
    return [
        MigrationProgress(
            version, group[0].migration, len(group), sum((version, step.name) in applied for step in group)
        )
        for version, group in sorted(found.items())
    ]


def check_version(where: str, facts: Mapping[str, Any]) -> None:
    """Reject tables that this code does not understand, or that are too old for it. `facts` are those of `outbox_meta`.

    >>> check_version("shop.db", {"version": SCHEMA_VERSION, "code_min": 1})
    """
    version, code_min = (int(facts.get(name, 0)) for name in ("version", "code_min"))
    if code_min > SCHEMA_VERSION:
        raise UsageError(
            f"the tables in {where} have version {version} and need a newer outrider than this one, which knows "
            f"version {SCHEMA_VERSION}; run: pip install --upgrade outrider"
        )
    if version < SCHEMA_VERSION_MIN:
        raise UsageError(
            f"the tables in {where} have version {version}, and this outrider needs version {SCHEMA_VERSION_MIN}; "
            "run: outrider db migrate"
        )


def choose_lanes(installed: int | None, wanted: int | None) -> int:
    """Return the number of lanes to install, or the installed number. A different wanted number is rejected.

    >>> choose_lanes(None, None), choose_lanes(8, None)
    (32, 8)
    """
    if installed is None:
        return LANES_DEFAULT if wanted is None else wanted
    if wanted not in (None, installed):
        raise UsageError(
            f"the outbox is installed with {installed} lanes per band, and {wanted} are wanted; the number is fixed, "
            f"because each event is in the lane of its key: leave it out, or install with {wanted} elsewhere"
        )
    return installed


def check_lanes(lanes: int | None) -> None:
    """Reject an invalid number of lanes; None is the default, or the installed number.

    >>> check_lanes(0)
    Traceback (most recent call last):
    ...
    outrider.errors.InvalidSetting: lanes = 0 cannot work; use 1 to 1024, 32 suits most
    """
    if lanes is not None and not 1 <= lanes <= LANES_MAX:
        raise InvalidSetting(f"lanes = {lanes} cannot work; use 1 to {LANES_MAX}, 32 suits most")


@dataclass(frozen=True, slots=True)
class Installer:
    """The installer of one kind of store. `steps` takes the number of lanes, which the first installation fixes."""

    steps: Callable[[int], list[MigrationStep]]
    texts: Mapping[str, str]
    begin: tuple[str, ...]
    """Names of the texts that create the table of records."""
    turn: tuple[str, ...] = ()
    """Names of the texts that lock out other migrators."""
    finish: Mapping[int, str] | None = None
    """Names of the texts that follow the last step of a version."""

    run = staticmethod(run_statements)

    def install(self, version: int, lanes: int | None) -> Statements[list[MigrationStep]]:
        """Run and return the pending steps up to a version."""
        check_lanes(lanes)
        yield from self.prepare()
        steps = self.steps((yield from self.lanes(lanes)))
        done = []
        for step in steps:
            if step.version <= version and (yield from self.apply(step, lanes)):
                done.append(step)  # noqa: PERF401 - a comprehension cannot yield
        for name in self._finish(done):
            yield self.texts[name]
        return done

    def prepare(self) -> Statements[None]:
        """Create the table of records."""
        for name in self.turn + self.begin:
            yield self.texts[name]

    def apply(self, step: MigrationStep, lanes: int | None) -> Statements[bool]:
        """Run and record one step, unless recorded before. A changed text is rejected."""
        for name in self.turn:
            yield self.texts[name]
        if not pending([step], (yield from self.applied())):
            return False
        # While this migrator waited for the lock, another may have installed a different number of lanes.
        known = self.steps((yield from self.lanes(lanes)))
        yield next(each.sql for each in known if (each.version, each.name) == (step.version, step.name))
        yield self.record(step)
        return True

    def written(self, version: int, lanes: int | None, *, after: int = 0) -> list[str]:
        """Return all texts of the versions after `after` and up to `version`, for offline use."""
        check_lanes(lanes)
        steps = [step for step in self.steps(choose_lanes(None, lanes)) if after < step.version <= version]
        texts = [text for step in steps for text in (step.sql, self.record(step))]
        names = (*self.turn, *self.begin)
        return [*(self.texts[name] for name in names), *texts, *(self.texts[name] for name in self._finish(steps))]

    def status(self) -> Statements[list[MigrationProgress]]:
        """Return the progress of each migration."""
        return progress(self.steps(1), (yield from self.applied()))

    def remove(self, version: int) -> Statements[list[str]]:
        """Remove a version and all later versions; return their names. Unfinished events or sagas are an error."""
        for name in self.turn:
            yield self.texts[name]
        found = yield from self.status()
        doomed = [each for each in reversed(found) if each.version >= version and each.applied]
        for each in doomed:
            yield from self._check(each)
        bare = not any(each.applied for each in found if each.version < version)
        for text in self.unwritten(*(each.version for each in doomed), bare=bare):  # noqa: UP028 - a list takes no rows
            yield text
        return [each.migration for each in doomed]

    def unwritten(self, *versions: int, bare: bool) -> list[str]:
        """Return the texts that remove versions, in the given order; `bare` also removes the table of records."""
        names = {step.version: _subject(step.migration) for step in self.steps(1)}
        texts = []
        for version in versions:
            texts += [text.strip() for text in _END.split(self.texts[names[version]]) if text.strip()]
            texts.append(fill(self.texts["forget"], {"version": str(version)}))
        return [*texts, self.texts["forget_all"]] if bare and versions else texts

    def applied(self) -> Statements[dict[tuple[int, str], str]]:
        """Return the checksums of the recorded steps, by version and name."""
        [[there]] = yield self.texts["has_record"]
        rows = (yield self.texts["applied"]) if there else ()
        return {(version, step): checksum for version, step, checksum in rows}

    def lanes(self, wanted: int | None, *, strict: bool = False) -> Statements[int]:
        """Return the installed number of lanes, or the wanted number before the first installation.

        If `strict`, a wanted number that differs from the installed number is rejected. A revision or a setting that
        names the number of the first installation stays valid.
        """
        [[there]] = yield self.texts["has_lanes"]
        rows = (yield self.texts["lanes"]) if there else ()
        return choose_lanes(int(rows[0][0]) if rows else None, wanted if strict or not rows else None)

    def record(self, step: MigrationStep) -> str:
        """Return the text that records a step."""
        facts = {"version": str(step.version), "step": step.name, "checksum": step.checksum}
        return fill(self.texts["record"], facts)

    def _finish(self, done: Sequence[MigrationStep]) -> list[str]:
        wanted = self.finish or {}
        return [wanted[version] for version in sorted({step.version for step in done}) if version in wanted]

    def _check(self, each: MigrationProgress) -> Statements[None]:
        name, subject = each.migration, _subject(each.migration)
        if each.state == "partial":
            raise UsageError(f"{name} is only partly installed, so it cannot be taken back; migrate forwards first")
        [[count]] = yield self.texts[f"{subject}_unfinished"]
        if count:
            raise UsageError(
                f"{name} cannot be taken back: {count} {_UNFINISHED[subject]}, and would be lost; let them be "
                "finished, or discard them, and try again"
            )


def _subject(migration: str) -> str:
    return migration.partition("_")[2]


class Migration(Protocol):
    """The progress of one migration."""

    @property
    def version(self) -> int: ...
    @property
    def migration(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def applied(self) -> int: ...
    @property
    def state(self) -> str: ...


class SchemaStep(Protocol):
    """One step of a migration."""

    @property
    def version(self) -> int: ...
    @property
    def migration(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def sql(self) -> str: ...


class Schema(Protocol):
    """Installation and upgrade of a store, with the same operations for every SQL store."""

    async def status(self) -> Sequence[Migration]:
        """Return the progress of each migration, without changes to the database."""
        ...

    async def plan(self) -> Sequence[SchemaStep]:
        """Return the steps that `migrate` would run, without changes to the database."""
        ...

    async def migrate(self) -> Sequence[SchemaStep]:
        """Run and return the pending steps."""
        ...
