"""The schema contract: installing a store, and upgrading it step by step. Migrations can be repeated and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Migration(Protocol):
    """How far one migration has come."""

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


class Step(Protocol):
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
    """Installing and upgrading a store, by the verbs that every SQL store has."""

    async def status(self) -> Sequence[Migration]:
        """Say how far each migration has come; changes nothing."""
        ...

    async def plan(self) -> Sequence[Step]:
        """Return the steps that `migrate` would run; changes nothing."""
        ...

    async def migrate(self) -> Sequence[Step]:
        """Run what is still to be done, and return it."""
        ...
