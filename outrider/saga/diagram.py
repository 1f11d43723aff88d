"""Mermaid diagrams of sagas: of a definition, and of one run.

Names and errors come from people and servers. All text is escaped, so no text can break or extend the diagram.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from outrider.saga.definition.children import PARENT_STEP
from outrider.saga.definition.steps import Definition, Step, StepAction, StepKind, base_name
from outrider.saga.model import JournalEntry, Phase, SagaRecord, StepStatus

SHAPES = {
    StepKind.LOCAL: ("[", "]"),
    StepKind.CALL: ("[[", "]]"),
    StepKind.REQUEST: ("[/", "/]"),
    StepKind.WAIT: ("{{", "}}"),
    StepKind.SLEEP: ("([", "])"),
    StepKind.CHILD: ("[\\", "\\]"),
    StepKind.FOR_EACH: ("[", "]"),
}
STYLES = {
    "pivot": "stroke-width:4px",
    "compensate": "stroke-dasharray:4 3",
    "planned": "fill:#e8e4f5,stroke:#6650a4,color:#1c1b1f",
    "started": "fill:#d7e8fb,stroke:#1565c0,color:#1c1b1f",
    "retrying": "fill:#fdeecb,stroke:#b26a00,color:#1c1b1f",
    "done": "fill:#d9f2dc,stroke:#2e7d32,color:#1c1b1f",
    "skipped": "fill:#ffffff,stroke:#9e9e9e,color:#616161",
    "rejected": "fill:#ececec,stroke:#616161,color:#1c1b1f",
    "failed": "fill:#fbdad7,stroke:#c62828,color:#1c1b1f",
}
"""The style of each class of nodes. The last seven are the step statuses."""

WORST_FIRST = ("failed", "rejected", "retrying", "started", "planned", "skipped", "done")

ERROR_CHARACTERS = 80
CHANGES_MAX = 12

# Characters that are not known to be harmless are written as numeric references. Mermaid would read them as its own
# notation, and some viewers as Markdown: lists, emphasis, links, icons. After `style` or `classDef` and a colon,
# Mermaid cuts off a character.
_ESCAPED = re.compile(
    r"[^\w\s.,:/()+='→…-]|^[-+=]+|^\d+[.)]|(?<![^\W_])_+|_+(?![^\W_])|:(?=//)|www\.|fa\w*:(?=fa)|style|classDef"
)

StepKey = tuple[str, Phase]


class Details(NamedTuple):
    """The additional labels and classes of a run."""

    begin: list[str]
    end: list[str]
    labels: Mapping[StepKey, list[str]]
    classes: Mapping[StepKey, str]
    more: list[str]


def mermaid(definition: Definition) -> str:
    """Draw a definition: the kinds and order of steps, the pivot, and the compensations.

    >>> from outrider.saga.definition.steps import StepAction
    >>> create = Step("create", StepKind.LOCAL, StepAction(print))
    >>> print(mermaid(Definition("order", 1, {"create": create})).split("    classDef")[0])
    flowchart TD
        begin(["order<br/>version 1"])
        s0["create<br/>local"]
        ended(["completed"])
        begin --> s0
        s0 --> ended
    <BLANKLINE>
    """
    begin = [definition.saga_type, f"version {definition.version}"]
    if definition.deadline_seconds is not None:
        begin.append(f"deadline {span(definition.deadline_seconds)}")
    return _picture(definition, Details(begin, ["completed"], {}, {}, []))


def mermaid_run(definition: Definition, record: SagaRecord, audit: Iterable[Mapping[str, Any]] = ()) -> str:
    """Draw one run: status, attempts, duration and error of the steps.

    With the audit log, the diagram also shows the status changes::

        record = await store.admin.show(saga_id)
        print(mermaid_run(order.definition, record, await store.admin.audit(saga_id)))
    """
    instance = record.instance
    version = f"version {instance.definition_version}"
    begin = [instance.saga_type, instance.correlation_id, version, _moment(instance.started_at)]
    if instance.parent_id:
        begin.append(f"child of {instance.parent_id}, step {instance.parent_step}")
    end: list[str] = [instance.status]
    if instance.ended_at:
        end.append(f"after {span((instance.ended_at - instance.started_at).total_seconds())}")
    if instance.needs_attention:
        end.append("needs attention")
    if instance.last_error:
        end.append(_short(instance.last_error))
    lines = {(entry.step, entry.phase): entry for entry in record.journal if entry.step != PARENT_STEP}
    if any((entry.step, entry.status) == (PARENT_STEP, StepStatus.STARTED) for entry in record.journal):
        end.append("waits for its parent")
    details = {step_key: list(_entry_labels(entry, record)) for step_key, entry in lines.items()}
    classes = {step_key: entry.status.value for step_key, entry in lines.items()}
    for step in definition.steps.values():
        if step.child and not step.for_each and (step.name, Phase.ACTION) in details:
            details[step.name, Phase.ACTION].append(str(step.child.saga.child_id(instance.saga_id, step.name)))
        if step.for_each:
            _sum_up_items(step.name, lines, details, classes)
    more = [*_undefined_entries(definition, lines, details), *_changes(audit)]
    return _picture(definition, Details(begin, end, details, classes, more))


def span(seconds: float) -> str:
    """Format a duration.

    >>> [span(s) for s in (0.0204, 1.25, 300, 7200, 259200)]
    ['20 ms', '1.2 s', '5 min', '2 h', '3 d']
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, size, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until:
            return f"{seconds / size:.3g} {unit}" if unit != "s" else f"{seconds:.1f} s"
    return f"{seconds / 86_400:.3g} d"


def label(lines: Iterable[str]) -> str:
    """Return lines of arbitrary text as one Mermaid label.

    >>> label(['say "hi"', "<b>"])
    '"say #34;hi#34;<br/>#60;b#62;"'
    """
    return f'"{"<br/>".join(_escape(line) for line in lines)}"'


def _escape(text: str) -> str:
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    escaped = _ESCAPED.sub(lambda found: "".join(f"#{ord(character)};" for character in found[0]), line)
    # Mermaid does not show a node without text.
    return escaped or "#8203;"


def _picture(definition: Definition, details: Details) -> str:
    numbers = {name: number for number, name in enumerate(definition.steps)}
    lines = [f"begin([{label(details.begin)}])"]
    for step in definition.steps.values():
        lines += _nodes(step, numbers[step.name], details)
    lines += [f"ended([{label(details.end)}])", *_edges(definition, numbers)]
    lines += details.more
    lines += [f"classDef {name} {style}" for name, style in STYLES.items()]
    lines += _classes(definition, numbers, details)
    return "flowchart TD\n" + "".join(f"    {line}\n" for line in lines)


def _nodes(step: Step, number: int, details: Details) -> Iterator[str]:
    left, right = SHAPES[step.kind]
    lines_told = details.labels.get((step.name, Phase.ACTION), [])
    yield f"s{number}{left}{label([step.name, *_kind(step), *lines_told])}{right}"
    if step.compensation:
        compensated = details.labels.get((step.name, Phase.COMPENSATION), [])
        yield f"u{number}{left}{label([_compensation_name(step.compensation), *compensated])}{right}"


def _kind(step: Step) -> Iterator[str]:
    command, seconds = step.action.command, step.action.timeout_seconds
    yield f"{step.kind}, pivot" if step.pivot else step.kind
    if step.kind is StepKind.SLEEP and seconds:
        yield span(seconds)
    elif step.child:
        yield step.child.name
    elif command:
        asked = f"{command.event_type} → {command.reply}" if command.event_type else str(command.reply)
        yield asked
    if step.for_each:
        yield f"for each of {getattr(step.for_each, '__name__', 'a list')}, {step.parallel_max} at a time"
    if step.when:
        yield f"if {getattr(step.when, '__name__', 'when')}"


def _compensation_name(compensate: StepAction) -> str:
    if compensate.command and not compensate.command.event_type:
        return "the child compensates"
    if compensate.command:
        return f"{compensate.command.event_type} → {compensate.command.reply}"
    return getattr(compensate.function, "__name__", "compensate")


def _edges(definition: Definition, numbers: Mapping[str, int]) -> Iterator[str]:
    followed = {name for step in definition.steps.values() for name in step.after}
    for step in definition.steps.values():
        node = f"s{numbers[step.name]}"
        yield from (f"s{numbers[name]} --> {node}" for name in step.after)
        if not step.after:
            yield f"begin --> {node}"
    yield from (f"s{numbers[name]} --> ended" for name in definition.steps if name not in followed)
    for step in definition.steps.values():
        if step.compensation:
            yield f"s{numbers[step.name]} -. compensate .-> u{numbers[step.name]}"


def _classes(definition: Definition, numbers: Mapping[str, int], details: Details) -> Iterator[str]:
    for step in definition.steps.values():
        nodes = {Phase.ACTION: f"s{numbers[step.name]}", Phase.COMPENSATION: f"u{numbers[step.name]}"}
        if step.pivot:
            yield f"class {nodes[Phase.ACTION]} pivot"
        if step.compensation:
            yield f"class {nodes[Phase.COMPENSATION]} compensate"
        for phase, node in nodes.items():
            # A step without a compensation has no node for one.
            if (found := details.classes.get((step.name, phase))) and (step.compensation or phase is Phase.ACTION):
                yield f"class {node} {found}"


def _entry_labels(entry: JournalEntry, record: SagaRecord) -> Iterator[str]:
    attempts = "1 attempt" if entry.attempts == 1 else f"{entry.attempts} attempts"
    yield f"{entry.status}, {attempts}" if entry.attempts else entry.status
    if entry.started_at:
        until = entry.ended_at or record.now
        word = "" if entry.ended_at else "for "
        yield f"{_moment(entry.started_at)}, {word}{span(max(0, (until - entry.started_at).total_seconds()))}"
    if entry.due_at and not entry.ended_at:
        yield f"due {_moment(entry.due_at)}"
    if entry.error:
        yield _short(entry.error)


def _undefined_entries(
    definition: Definition, lines: Mapping[StepKey, JournalEntry], details: Mapping[StepKey, list[str]]
) -> Iterator[str]:
    """Show journal entries that are missing in the definition; without them the diagram would be wrong."""
    for number, (name, phase) in enumerate(lines):
        step = definition.find(name)
        if step is None or (phase is Phase.COMPENSATION and step.compensation is None):
            yield f"x{number}[{label([name, f'{phase}, not in this definition', *details[name, phase]])}]"


def _changes(audit: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Show when and why the status changed; only the latest changes, if there are many."""
    changes = [note for note in audit if note["old_status"] != note["new_status"]]
    if changes:
        lines_told = [f"{_moment(note['at'])} {note['new_status']}: {note['what']}" for note in changes[-CHANGES_MAX:]]
        yield f"trail>{label(lines_told)}]"
        yield "ended -.- trail"


def _sum_up_items(
    name: str, lines: Mapping[StepKey, JournalEntry], details: dict[StepKey, list[str]], classes: dict[StepKey, str]
) -> None:
    """Show the items of a step in the node of the step: how many have each status, and the first error."""
    for phase in Phase:
        items = [
            entry for (step, at), entry in lines.items() if at is phase and step != name and base_name(step) == name
        ]
        if items:
            counts = Counter(entry.status.value for entry in items)
            error = next((_short(f"{entry.step}: {entry.error}") for entry in items if entry.error), None)
            counted = ", ".join(f"{count} {status}" for status, count in counts.items())
            details[name, phase] = [*details.get((name, phase), []), counted, *filter(None, [error])]
            worst = min(counts, key=WORST_FIRST.index)
            classes.setdefault((name, phase), worst)


def _moment(at: Any) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}" if isinstance(at, datetime) else str(at)


def _short(text: str) -> str:
    return text if len(text) <= ERROR_CHARACTERS else f"{text[:ERROR_CHARACTERS]}…"
