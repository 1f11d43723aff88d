"""The fingerprint of a definition: the parts that must not change while a saga runs, stored when the saga starts.

A change of the steps under the same version is reported before the saga runs a step of the new definition. Changes of
completed steps are allowed, and changes of code, payloads, timeouts and retry policies at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from zlib import crc32

from outrider.saga.definition.steps import Definition, Step
from outrider.saga.model import Phase, SagaRecord, Status, StepStatus

ENDED = frozenset({Status.COMPLETED, Status.COMPENSATED})


class FingerprintLine(NamedTuple):
    """One step of a fingerprint. `flags` has `p` for the pivot and `c` for a compensation; `replies` is a checksum."""

    name: str
    kind: str
    flags: str
    after: tuple[str, ...]
    replies: int


def fingerprint(steps: Mapping[str, Step]) -> str:
    """Return the fingerprint of steps as text.

    >>> from outrider.saga.definition.steps import StepAction, StepKind
    >>> create = Step("create", StepKind.LOCAL, StepAction())
    >>> nap = Step("nap", StepKind.SLEEP, StepAction(), after=("create",))
    >>> fingerprint({"create": create, "nap": nap})
    '[["create","local","",[]],["nap","sleep","",[0]]]'
    """
    numbers = {name: number for number, name in enumerate(steps)}
    return json.dumps([_columns(step, numbers) for step in steps.values()], separators=(",", ":"), ensure_ascii=False)


def definition_changed(definition: Definition, record: SagaRecord) -> str | None:
    """Return the change of the definition since the saga started, or None if the saga is not affected.

    ```python
    definition_changed(order.definition, await store.admin.show(saga_id))
    ```
    """
    instance = record.instance
    if definition.fingerprint == instance.fingerprint or not definition.fingerprint or not instance.fingerprint:
        return None
    if instance.status in ENDED or any(entry.phase is Phase.COMPENSATION for entry in record.journal):
        # Compensations are already in the journal, and no further action will start.
        return None
    done = {entry.step for entry in record.journal if entry.status is StepStatus.DONE}
    change = next(_changes(_lines(instance.fingerprint), _lines(definition.fingerprint), done), None)
    if change is None:
        return None
    version = definition.version
    return (
        f"the definition of {definition.saga_type} v{version} has changed since this saga started: {change}; give it "
        f"version={version + 1} and keep v{version}"
    )


def _columns(step: Step, numbers: Mapping[str, int]) -> list[object]:
    flags = ("p" if step.pivot else "") + ("c" if step.compensation else "")
    after = [numbers[name] for name in step.after if name in numbers]
    replies = " ".join(f"{event_type}@{topic}" for event_type, topic in sorted(step.replies.items()))
    return [step.name, step.kind.value, flags, after, *([crc32(replies.encode())] if replies else [])]


def _lines(text: str) -> dict[str, FingerprintLine]:
    rows = json.loads(text)
    names = [row[0] for row in rows]
    lines = (
        FingerprintLine(name, kind, flags, tuple(names[number] for number in after), next(iter(rest), 0))
        for name, kind, flags, after, *rest in rows
    )
    return {line.name: line for line in lines}


def _changes(old: Mapping[str, FingerprintLine], new: Mapping[str, FingerprintLine], done: set[str]) -> Iterator[str]:
    yield from (f"step {name} was inserted{_position(new, name)}" for name in new if name not in old)
    yield from (f"step {name} was taken out" for name in old if name not in new)
    settled = any("p" in old[name].flags for name in done if name in old)
    for name, line in new.items():
        if name in old:
            yield from _changes_of(old[name], line, done=name in done, settled=settled)


def _position(lines: Mapping[str, FingerprintLine], name: str) -> str:
    followers = [line.name for line in lines.values() if name in line.after]
    if followers:
        return f" before {' and '.join(followers)}"
    after = lines[name].after
    return f" after {' and '.join(after)}" if after else ""


def _changes_of(old: FingerprintLine, new: FingerprintLine, *, done: bool, settled: bool) -> Iterator[str]:
    if ("p" in old.flags) != ("p" in new.flags):
        yield f"step {new.name} is {'the pivot now' if 'p' in new.flags else 'not the pivot any more'}"
    # An added compensation helps sagas that already run.
    if "c" in old.flags and "c" not in new.flags and not settled:
        yield f"step {new.name} has no compensation any more"
    if done:
        return
    if old.kind != new.kind:
        yield f"step {new.name} is a {new.kind} now, and was a {old.kind}"
    if set(old.after) != set(new.after):
        yield f"step {new.name} comes after {_named(new)} now, and came after {_named(old)}"
    if old.replies != new.replies:
        yield f"step {new.name} has other replies"


def _named(line: FingerprintLine) -> str:
    return " and ".join(line.after) or "nothing"
