"""Installing a store by texts alone, for whoever brings a connection: ours, Django's, Alembic's or a person's.

Each script yields a text, is sent its rows, and returns what came of it. The texts have no parameters. A step and its
record belong in one transaction, so a run that broke off resumes; all steps may share one as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.errors import BadSetting, Misuse
from outrider.stores.migrations import Progress, Step, pending, progress
from outrider.stores.queries import fill

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]
Script = Generator[str, Rows, T]
"""Yields texts, is sent their rows, returns what came of it."""

LANES_MAX = 1024
LATER = {name: f"{{{name}}}" for name in ("version", "step", "checksum")}
"""Constants that are filled in for each step, and stay as they are until then."""


def check_lanes(lanes: int) -> None:
    """Refuse a number of lanes that cannot work.

    >>> check_lanes(0)
    Traceback (most recent call last):
    ...
    outrider.errors.BadSetting: lanes = 0 cannot work; use 1 to 1024, 32 suits most
    """
    if not 1 <= lanes <= LANES_MAX:
        raise BadSetting(f"lanes = {lanes} cannot work; use 1 to {LANES_MAX}, 32 suits most")


def perform(script: Script[T], execute: Callable[[str], Rows]) -> T:
    """Run a script to its end and return its result.

    >>> def script():
    ...     [[value]] = yield "SELECT 7"
    ...     return value
    >>> perform(script(), lambda text: [[7]])
    7
    """
    try:
        text = next(script)
        while True:
            text = script.send(execute(text))
    except StopIteration as end:
        result: T = end.value
        return result


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one kind of store is installed. `steps` takes the number of lanes, which the first installation fixes."""

    steps: Callable[[int], list[Step]]
    texts: Mapping[str, str]
    begin: tuple[str, ...]
    """Names of the texts that make room for the record."""
    turn: tuple[str, ...] = ()
    """Names of the texts with which migrators take turns."""
    finish: Mapping[int, str] | None = None
    """Names of the texts that follow the last step of a version."""

    perform = staticmethod(perform)

    def install(self, version: int, lanes: int) -> Script[list[Step]]:
        """Run what is pending up to a version, and return it."""
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

    def prepare(self) -> Script[None]:
        """Make room for the record."""
        for name in self.turn + self.begin:
            yield self.texts[name]

    def apply(self, step: Step, lanes: int) -> Script[bool]:
        """Run one step and record it, unless that was done; a changed text is refused."""
        for name in self.turn:
            yield self.texts[name]
        if not pending([step], (yield from self.applied())):
            return False
        # Who waited for the turn may have planned with another number of lanes than the one installed meanwhile.
        known = self.steps((yield from self.lanes(lanes)))
        yield next(each.sql for each in known if (each.version, each.name) == (step.version, step.name))
        yield self.record(step)
        return True

    def written(self, version: int, lanes: int, *, after: int = 0) -> list[str]:
        """Return all texts of the versions after one and up to another, for a database that cannot be asked."""
        check_lanes(lanes)
        steps = [step for step in self.steps(lanes) if after < step.version <= version]
        texts = [text for step in steps for text in (step.sql, self.record(step))]
        names = (*self.turn, *self.begin)
        return [*(self.texts[name] for name in names), *texts, *(self.texts[name] for name in self._finish(steps))]

    def status(self) -> Script[list[Progress]]:
        """Say how far each migration has come."""
        return progress(self.steps(1), (yield from self.applied()))

    def remove(self, version: int) -> Script[list[str]]:
        """Take a version back and all that came after it; return their names. Refused while something is unfinished."""
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
        """Return the texts that take versions back, in the order given; `bare` takes the record away as well."""
        names = {step.version: _subject(step.migration) for step in self.steps(1)}
        texts = []
        for version in versions:
            texts += [text.strip() for text in self.texts[names[version]].split(";") if text.strip()]
            texts.append(fill(self.texts["forget"], {"version": str(version)}))
        return [*texts, self.texts["forget_all"]] if bare and versions else texts

    def applied(self) -> Script[dict[tuple[int, str], str]]:
        """Return the checksums of the steps that are recorded, by version and name."""
        [[there]] = yield self.texts["has_record"]
        rows = (yield self.texts["applied"]) if there else ()
        return {(version, step): checksum for version, step, checksum in rows}

    def lanes(self, wanted: int) -> Script[int]:
        """Return the number of lanes that is fixed; the one that is wanted only if none is yet."""
        [[there]] = yield self.texts["has_lanes"]
        rows = (yield self.texts["lanes"]) if there else ()
        return int(rows[0][0]) if rows else wanted

    def record(self, step: Step) -> str:
        """Return the text that records a step."""
        facts = {"version": str(step.version), "step": step.name, "checksum": step.checksum}
        return fill(self.texts["record"], facts)

    def _finish(self, done: Sequence[Step]) -> list[str]:
        wanted = self.finish or {}
        return [wanted[version] for version in sorted({step.version for step in done}) if version in wanted]

    def _check(self, each: Progress) -> Script[None]:
        name, subject = each.migration, _subject(each.migration)
        if each.state == "partial":
            raise Misuse(f"{name} is only partly installed, so it cannot be taken back; migrate forwards first")
        [[count]] = yield self.texts[f"{subject}_unfinished"]
        if count:
            raise Misuse(
                f"{name} cannot be taken back: {count} {_UNFINISHED[subject]}, and would be lost; let them be "
                "finished, or discard them, and try again"
            )


_UNFINISHED = {
    "outbox": "events are not delivered or are dead letters",
    "inbox": "events wait at consumers or are their dead letters",
    "saga": "sagas are under way or need a person",
}


def _subject(migration: str) -> str:
    return migration.partition("_")[2]
