"""Who writes for sagas into the caller's own transaction, whichever driver it belongs to.

The engine states here what it needs. The composition root, which knows the drivers, provides it when it is imported, as
happens with anything of this package.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol
from uuid import UUID

from outrider.errors import Misuse
from outrider.event import Event
from outrider.saga_store import Entered, NewMail, NewSaga, Phase

Stage = Callable[..., Awaitable[list[UUID]]]
"""Takes a transaction and events."""


class Clerk(Protocol):
    """Writes through a connection; `outrider.Outbox` is one."""

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events."""
        ...

    async def start_saga(self, conn: Any, saga: NewSaga) -> bool:
        """Start a saga; False if it is there already."""
        ...

    async def post_mail(self, conn: Any, mail: Sequence[NewMail]) -> int:
        """Post mail to sagas; return how many were new."""
        ...

    async def barrier_enter(self, conn: Any, participant: str, key: str, phase: Phase) -> Entered:
        """Let a command through a participant's barrier, or say what became of it before."""
        ...

    async def barrier_keep(self, conn: Any, participant: str, key: str, phase: Phase, reply: bytes) -> None:
        """Keep what was answered to a command."""
        ...


_usual: list[Clerk] = []


def employ(clerk: Clerk) -> None:
    """Let everybody who names no other use this one."""
    _usual[:] = [clerk]


def usual() -> Clerk:
    """Return the one in use.

    >>> usual().__class__.__name__
    'Outbox'
    """
    if not _usual:
        raise Misuse("nobody writes for sagas yet; import outrider first")
    return _usual[0]
