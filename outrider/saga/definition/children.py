"""Children in definitions: the part of a child that its parent knows, the messages between them, and the checks.

A parent and its children are rows of one store, and talk by messages in their mailboxes. No broker is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from outrider.errors import UsageError
from outrider.saga.definition.validation import Function
from outrider.saga.model import Instance, NewSaga

if TYPE_CHECKING:
    from outrider.saga.definition.steps import Definition, Step

PARENT_STEP = "(parent)"
"""The name of the last wait of a child, which no other step can have."""

CHILD_DONE, CHILD_REJECTED, CHILD_COMPENSATED = "child.done", "child.rejected", "child.compensated"
"""The outcomes that a child reports. The body of the first is the final state, that of the others has the reason."""

PARENT_COMPLETED, PARENT_COMPENSATES = "parent.completed", "parent.compensates"
"""The messages that end the last wait of a child."""

CALL_OFF = "call_off"
"""The command with which a parent that is going to compensate calls a running child off."""

FAMILY_MESSAGES = frozenset({CHILD_DONE, CHILD_REJECTED, CHILD_COMPENSATED, PARENT_COMPLETED, PARENT_COMPENSATES})


class ChildSaga(Protocol):
    """The definition of a child, as far as its parent needs it."""

    line: str
    saga_type: str
    version: int
    state_type: type[Any]

    @property
    def children(self) -> Sequence[ChildSaga]:
        """Return the sagas that steps of the child start in turn."""
        ...

    @property
    def definition(self) -> Definition:
        """Return the checked definition."""
        ...

    def child_id(self, parent_id: UUID, step: str) -> UUID:
        """Return the id of the child of a step."""
        ...

    def child_of(self, parent: Instance, step: str, state: Any) -> NewSaga:
        """Return the child of a step, to be started. Raises InvalidHandler for a state of another type."""
        ...


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The child of a step. `input` makes its first state from the state of the parent."""

    saga: ChildSaga
    input: Function

    @property
    def name(self) -> str:
        """Return the type and the version, for people."""
        return f"{self.saga.saga_type} version {self.saga.version}"


def check_children(saga: ChildSaga, steps: Iterable[Step], has_way_back: Callable[[Step], bool]) -> None:
    """Reject a cycle of sagas, and a child with a pivot in a step that may have to be compensated."""
    if circle := find_cycle([saga]):
        names = " starts ".join(each.saga_type for each in circle)
        raise UsageError(f"{circle[0].line}: {names}, so none of them would ever end; take one of these children away")
    for step in steps:
        pivot = step.child.saga.definition.pivot if step.child else None
        if step.child and pivot and has_way_back(step):
            raise UsageError(
                f"{step.line}: {step.name} starts {step.child.saga.saga_type}, which cannot be compensated after its "
                f"pivot {pivot.name} ({pivot.line}); make {step.name} the pivot of {saga.saga_type} (pivot=True), put "
                "it after the pivot, or take the pivot of the child away"
            )


def find_cycle(path: Sequence[ChildSaga]) -> Sequence[ChildSaga] | None:
    """Return a path of sagas from a saga back to itself, each the child of the saga before, or None.

    >>> find_cycle([]) is None
    True
    """
    for child in path[-1].children if path else ():
        if child in path:
            return [*path[path.index(child) :], child]
        if found := find_cycle([*path, child]):
            return found
    return None
