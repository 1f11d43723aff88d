"""A definition in short: what a saga counts on for as long as it runs, stored when it starts.

Who changes steps under one version is told before anything is done that nobody meant. What a saga has behind it may
change, and code, payloads, times and budgets may do so at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from zlib import crc32

from outrider.saga.steps import Definition, Step
from outrider.saga_store import Phase, Progress, Record, Status

OVER = frozenset({Status.COMPLETED, Status.COMPENSATED})


class Line(NamedTuple):
    """A step in short. `flags` has a `p` for the pivot and a `u` for an undo; `replies` is a number made of them."""

    name: str
    kind: str
    flags: str
    after: tuple[str, ...]
    replies: int


def outline(steps: Mapping[str, Step]) -> str:
    """Return steps in short, as text.

    >>> from outrider.saga.steps import Act, Kind
    >>> create, nap = Step("create", Kind.LOCAL, Act()), Step("nap", Kind.SLEEP, Act(), after=("create",))
    >>> outline({"create": create, "nap": nap})
    '[["create","local","",[]],["nap","sleep","",[0]]]'
    """
    numbers = {name: number for number, name in enumerate(steps)}
    return json.dumps([_columns(step, numbers) for step in steps.values()], separators=(",", ":"), ensure_ascii=False)


def drift(definition: Definition, record: Record) -> str | None:
    """Say what was changed since a saga has started, if it has not that behind it; else None.

    ```python
    drift(order.definition, await store.desk.show(saga_id))
    ```
    """
    instance = record.instance
    if definition.outline == instance.outline or not definition.outline or not instance.outline:
        return None
    if instance.status in OVER or any(entry.phase is Phase.COMPENSATION for entry in record.journal):
        # What is undone is in the journal already, and the rest will not be done.
        return None
    done = {entry.step for entry in record.journal if entry.progress is Progress.DONE}
    change = next(_changes(_lines(instance.outline), _lines(definition.outline), done), None)
    if change is None:
        return None
    version = definition.version
    return (
        f"the definition of {definition.saga_type} v{version} has changed since this saga started: {change}; give it "
        f"version={version + 1} and keep v{version}"
    )


def _columns(step: Step, numbers: Mapping[str, int]) -> list[object]:
    flags = ("p" if step.pivot else "") + ("u" if step.undo else "")
    after = [numbers[name] for name in step.after if name in numbers]
    replies = " ".join(f"{event_type}@{topic}" for event_type, topic in sorted(step.replies.items()))
    return [step.name, step.kind.value, flags, after, *([crc32(replies.encode())] if replies else [])]


def _lines(text: str) -> dict[str, Line]:
    rows = json.loads(text)
    names = [row[0] for row in rows]
    lines = (
        Line(name, kind, flags, tuple(names[number] for number in after), next(iter(rest), 0))
        for name, kind, flags, after, *rest in rows
    )
    return {line.name: line for line in lines}


def _changes(old: Mapping[str, Line], new: Mapping[str, Line], done: set[str]) -> Iterator[str]:
    yield from (f"step {name} was inserted{_place(new, name)}" for name in new if name not in old)
    yield from (f"step {name} was taken out" for name in old if name not in new)
    settled = any("p" in old[name].flags for name in done if name in old)
    for name, line in new.items():
        if name in old:
            yield from _changes_of(old[name], line, done=name in done, settled=settled)


def _place(lines: Mapping[str, Line], name: str) -> str:
    followers = [line.name for line in lines.values() if name in line.after]
    if followers:
        return f" before {' and '.join(followers)}"
    after = lines[name].after
    return f" after {' and '.join(after)}" if after else ""


def _changes_of(old: Line, new: Line, *, done: bool, settled: bool) -> Iterator[str]:
    if ("p" in old.flags) != ("p" in new.flags):
        yield f"step {new.name} is {'the pivot now' if 'p' in new.flags else 'not the pivot any more'}"
    # One that was added helps whoever runs already.
    if "u" in old.flags and "u" not in new.flags and not settled:
        yield f"step {new.name} has no undo any more"
    if done:
        return
    if old.kind != new.kind:
        yield f"step {new.name} is a {new.kind} now, and was a {old.kind}"
    if set(old.after) != set(new.after):
        yield f"step {new.name} comes after {_named(new)} now, and came after {_named(old)}"
    if old.replies != new.replies:
        yield f"step {new.name} has other replies"


def _named(line: Line) -> str:
    return " and ".join(line.after) or "nothing"
