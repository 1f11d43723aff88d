"""A saga that lives in the shop, beside its models."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.saga import Run, Saga, Sagas
from tests.django_project.shop.models import Order


@dataclass
class Placing:
    """What the saga knows."""

    number: str = Order._meta.label


placing = Saga("placing", Placing)


@placing.call()
async def note(run: Run[Placing]) -> None:
    """Note the order."""
    run.state.number += "!"


sagas = Sagas(placing)
