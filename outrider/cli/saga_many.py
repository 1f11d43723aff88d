"""Which sagas an order is for: those that are named, or many at once; never many by accident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.errors import Misuse
from outrider.saga_store import Instance, SagaCriteria, SagaDesk, Status

MOST = 10_000
"""Sagas that are looked at for one command."""

NOT_OVER = (Status.STARTED, Status.RUNNING, Status.COMPENSATING, Status.FAILED)

Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of sagas; with --type, correlation ids.")]
OfType = Annotated[str | None, typer.Option("--type", help="The type of the sagas; IDs are correlation ids then.")]
Attention = Annotated[bool, typer.Option("--attention", help="All of the type that need a person.")]
All = Annotated[bool, typer.Option("--all", help="All of the type that have neither completed nor been compensated.")]
AtStep = Annotated[str | None, typer.Option("--step", help="Of those, only the ones that stand at this step.")]
AtMost = Annotated[int, typer.Option("--limit", min=1, max=MOST, help="How many of those at most.")]


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice that is neither empty nor contradictory."""

    ids: tuple[str, ...]
    saga_type: str | None
    attention: bool = False
    step: str | None = None
    limit: int = 1000

    @classmethod
    def of(
        cls,
        verb: str,
        ids: Sequence[str] | None,
        saga_type: str | None,
        *,
        attention: bool,
        everything: bool,
        step: str | None,
        limit: int,
    ) -> Choice:
        """Read a choice from a command's options.

        >>> Choice.of("retry", None, "order", attention=True, everything=False, step=None, limit=10).many
        True
        """
        many = attention or everything
        if bool(ids) == many or (attention and everything):
            raise Misuse(
                f"say which sagas to {verb}, in one way: ids, or --attention, or --all; `outrider saga ls --attention` "
                "shows what there is"
            )
        if many and saga_type is None:
            raise Misuse(f"to {verb} many at once, say of which type: --type order")
        if step is not None and not many:
            raise Misuse("--step chooses among many; add --attention or --all, or leave it out")
        return cls(tuple(ids or ()), saga_type, attention, step, limit)

    @property
    def many(self) -> bool:
        """Tell whether they are not named one by one."""
        return not self.ids

    async def find(self, desk: SagaDesk) -> list[Instance]:
        """List those that are meant; one more than the limit, if there are more."""
        wanted = [None] if self.attention else list(NOT_OVER)
        found = [
            saga
            for status in wanted
            for saga in await desk.find(
                SagaCriteria((), self.saga_type, None, status, True if self.attention else None, None, MOST)
            )
        ]
        return [saga for saga in found if self.step in (None, saga.current_step)][: self.limit + 1]
