"""Which dead letters a person means: by id, by filter, or all of them; never all of them by accident."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from outrider.cli.errors import Undone
from outrider.cli.options import event_ids
from outrider.config import nearest
from outrider.errors import Misuse
from outrider.outcome import Reason
from outrider.store import Criteria, Desk

MOST = 10_000
"""Dead letters that one command takes on; the next run takes the next ones."""

Work = Callable[[Desk, list[dict[str, Any]]], Awaitable[int]]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[EVENT_ID]...", help="Which ones, by id.")]
WithReason = Annotated[str | None, typer.Option("--reason", help="Only those buried for this reason.")]
All = Annotated[bool, typer.Option("--all", help="All that there are.")]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done about the chosen ones, and how."""

    verb: str
    done: str
    dry_run: bool
    yes: bool
    json: bool
    grave: bool
    """Whether it is final, or takes many at once; then it needs a yes."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice that is neither empty nor contradictory."""

    criteria: Criteria

    @classmethod
    def of(
        cls,
        verb: str,
        ids: Sequence[str] | None,
        *,
        topic: str | None,
        event_type: str | None,
        key: str | None,
        why: str | None,
        everything: bool,
    ) -> Selection:
        """Read a choice from a command's options."""
        filtered = any(value is not None for value in (topic, event_type, key, why))
        if sum((bool(ids), filtered, everything)) != 1:
            raise Misuse(
                f"say which dead letters to {verb}, in one way: event ids, or filters (--topic, --event-type, --key, "
                "--reason), or --all; `outrider dead ls` shows what there is"
            )
        return cls(Criteria(event_ids(ids), None, event_type, topic, key, reason(why), MOST))

    def complain(self, rows: Sequence[dict[str, Any]]) -> None:
        """Say what the choice did not reach."""
        found = {str(row["event_id"]) for row in rows}
        missing = [str(wanted) for wanted in self.criteria.event_ids if str(wanted) not in found]
        if missing:
            raise Undone(f"no dead letter {', '.join(missing)}; see `outrider dead ls`")
        if len(rows) == MOST:
            raise Undone(f"only the first {MOST} were taken on; run the command again for the rest")


def reason(text: str | None) -> str | None:
    """Read a reason, or name the nearest.

    >>> reason("poison_message")
    'poison_message'
    """
    known = [str(reason) for reason in Reason]
    if text is None or text in known:
        return text
    hint = f"did you mean {near}? " if (near := nearest(text, known)) else ""
    raise Misuse(f"{text!r} is not a reason; {hint}(valid: {', '.join(known)})")
