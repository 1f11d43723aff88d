"""The fingerprint of a definition: the parts that must not change while a saga runs, stored when the saga starts.

A change of the steps under the same version is reported before the saga runs a step of the new definition. A completed
step may change, except for a compensation that may still run: its command must reach the participant that executed the
action. Code, payloads, timeouts and retry policies may change at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from zlib import crc32

from outrider.event import default_topic
from outrider.saga.definition.steps import CommandSpec, Definition, Step, StepAction, StepKind, base_name
from outrider.saga.model import PASSED, Phase, SagaRecord, Status, StepStatus

ENDED = frozenset({Status.COMPLETED, Status.COMPENSATED})


class FingerprintLine(NamedTuple):
    """One step of a fingerprint. `flags` has `p` for the pivot, `c` for a compensation, `w` for a condition and
    `f` for a list of items.

    `command`, `replies` and `compensation` are checksums: of the command and its topic, of the replies and their
    topics, and of all of these for the compensation. Zero stands for nothing. For a child they are of its type and
    version, of the presence of a result, and of its type, by which its id is found again.
    """

    name: str
    kind: str
    flags: str
    after: tuple[str, ...]
    command: int = 0
    replies: int = 0
    compensation: int = 0


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
    if instance.status in ENDED:
        return None
    lines = _lines(instance.fingerprint), _lines(definition.fingerprint)
    change = next(_changes(*lines, _Progress.of(record)), None)
    if change is None:
        return None
    version = definition.version
    return (
        f"the definition of {definition.saga_type} v{version} has changed since this saga started: {change}; give it "
        f"version={version + 1} and keep v{version}"
    )


def _columns(step: Step, numbers: Mapping[str, int]) -> list[object]:
    flags = ("p" if step.pivot else "") + ("c" if step.compensation else "") + ("w" if step.when else "")
    flags += "f" if step.for_each else ""
    after = [numbers[name] for name in step.after if name in numbers]
    texts = *_texts(step.action), " ".join(_texts(step.compensation)).strip()
    if step.child:
        texts = step.child.name, "result" if step.reply_functions else "", step.child.saga.saga_type
    sums = [crc32(text.encode()) for text in texts]
    while sums and not sums[-1]:
        sums.pop()
    return [step.name, step.kind.value, flags, after, *sums]


def _texts(action: StepAction | None) -> tuple[str, str]:
    """Return the command of an action with its topic, and the replies with their topics."""
    command = action.command if action else None
    if command is None:
        return "", ""
    asked = f"{command.event_type}@{command.topic}" if command.event_type else ""
    return asked, " ".join(_replies(command))


def _replies(command: CommandSpec) -> Iterator[str]:
    for event_type in (command.reply, command.rejection):
        if event_type:
            yield f"{event_type}@{default_topic(event_type, command.reply_topic, None)}"


def _lines(text: str) -> dict[str, FingerprintLine]:
    rows = json.loads(text)
    names = [row[0] for row in rows]
    lines = (
        FingerprintLine(name, kind, flags, tuple(names[number] for number in after), *sums)
        for name, kind, flags, after, *sums in rows
    )
    return {line.name: line for line in lines}


class _Progress(NamedTuple):
    """The steps of a saga that a change may concern.

    With a compensation in the journal, no further action starts: `open` has the actions that may still be repeated.
    """

    done: set[str]
    skipped: set[str]
    open: set[str]
    planned: set[str]
    compensated: set[str]

    @classmethod
    def of(cls, record: SagaRecord) -> _Progress:
        actions = [entry for entry in record.journal if entry.phase is Phase.ACTION]
        compensations = [entry for entry in record.journal if entry.phase is Phase.COMPENSATION]
        begun = {base_name(entry.step) for entry in compensations if entry.status is not StepStatus.DONE}
        return cls(
            {entry.step for entry in actions if entry.status in PASSED},
            {entry.step for entry in actions if entry.status is StepStatus.SKIPPED},
            {base_name(entry.step) for entry in actions if entry.status in (StepStatus.STARTED, StepStatus.RETRYING)},
            begun,
            {base_name(entry.step) for entry in compensations if entry.status is StepStatus.DONE} - begun,
        )

    @property
    def is_compensating(self) -> bool:
        return bool(self.planned or self.compensated)

    def has_action_ahead(self, name: str) -> bool:
        return name in self.open if self.is_compensating else name not in self.done

    def has_compensation_ahead(self, name: str) -> bool:
        if name in self.skipped:
            return False
        return not self.is_compensating or name in (self.planned | self.done) - self.compensated


def _changes(
    old: Mapping[str, FingerprintLine], new: Mapping[str, FingerprintLine], progress: _Progress
) -> Iterator[str]:
    if not progress.is_compensating:
        yield from (f"step {name} was inserted{_position(new, name)}" for name in new if name not in old)
        yield from (f"step {name} was taken out" for name in old if name not in new)
        yield from _pivot_changes(old, new)
    is_past_pivot = any("p" in old[name].flags for name in progress.done if name in old)
    for name in (name for name in new if name in old):
        if progress.has_action_ahead(name):
            yield from _action_changes(old[name], new[name])
        if not is_past_pivot and progress.has_compensation_ahead(name):
            yield from _compensation_changes(old[name], new[name])


def _position(lines: Mapping[str, FingerprintLine], name: str) -> str:
    followers = [line.name for line in lines.values() if name in line.after]
    if followers:
        return f" before {' and '.join(followers)}"
    after = lines[name].after
    return f" after {' and '.join(after)}" if after else ""


def _pivot_changes(old: Mapping[str, FingerprintLine], new: Mapping[str, FingerprintLine]) -> Iterator[str]:
    for name in (name for name in new if name in old):
        if ("p" in old[name].flags) != ("p" in new[name].flags):
            yield f"step {name} is {'the pivot now' if 'p' in new[name].flags else 'not the pivot any more'}"


def _compensation_changes(old: FingerprintLine, new: FingerprintLine) -> Iterator[str]:
    if "c" not in old.flags:
        # An added compensation helps sagas that already run.
        return
    if "c" not in new.flags:
        yield f"step {new.name} has no compensation any more"
    elif old.kind != new.kind:
        yield f"step {new.name} is a {new.kind} now, and was a {old.kind}, and its compensation is still ahead"
    elif old.compensation != new.compensation and new.kind == StepKind.CHILD:
        yield f"step {new.name} has a child of another type, and the child of this saga is still to be compensated"
    elif old.compensation != new.compensation:
        yield f"the compensation of step {new.name} has another command, topic or reply"


def _action_changes(old: FingerprintLine, new: FingerprintLine) -> Iterator[str]:
    if old.kind != new.kind:
        yield f"step {new.name} is a {new.kind} now, and was a {old.kind}"
    if set(old.after) != set(new.after):
        yield f"step {new.name} comes after {_named(new)} now, and came after {_named(old)}"
    if ("w" in old.flags) != ("w" in new.flags):
        yield f"step {new.name} {'has a condition now' if 'w' in new.flags else 'has no condition any more'}"
    if ("f" in old.flags) != ("f" in new.flags):
        yield f"step {new.name} {'is run for each item now' if 'f' in new.flags else 'is run only once now'}"
    is_child = old.kind == new.kind == StepKind.CHILD
    if old.command != new.command:
        yield f"step {new.name} has another {'child, or another version of it' if is_child else 'command or topic'}"
    if old.replies != new.replies:
        change = f"{'has' if new.replies else 'does not have'} a result of its child now"
        yield f"step {new.name} {change if is_child else 'has other replies'}"


def _named(line: FingerprintLine) -> str:
    return " and ".join(line.after) or "nothing"
