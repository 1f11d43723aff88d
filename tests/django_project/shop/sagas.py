"""A saga that lives in the shop, beside its models."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.saga import Saga, SagaRegistry, StepContext
from tests.django_project.shop.models import Order


@dataclass
class Placing:
    """The state of the saga."""

    number: str = Order._meta.label


placing = Saga("placing", Placing)


@placing.call()
async def note(run: StepContext[Placing]) -> None:
    """Note the order."""
    run.state.number += "!"


sagas = SagaRegistry(placing)
