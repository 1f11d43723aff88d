"""Whether the functions of local steps fit the store that lends them its transactions, told before any saga runs."""

from __future__ import annotations

from outrider.errors import UnfitHandler
from outrider.saga.faults import beginning
from outrider.saga.sagas import Sagas
from outrider.saga.steps import Kind, Step
from outrider.saga_store import SagaStore


def check_locals(store: SagaStore, sagas: Sagas) -> None:
    """Refuse a function that cannot work, with the line it begins in::

    check_locals(await open_sagas(url), Sagas(order))
    """
    for saga in sagas:
        for step in saga.definition.steps.values():
            if step.kind is Kind.LOCAL:
                _check(store, saga.saga_type, step)


def _check(store: SagaStore, saga_type: str, step: Step) -> None:
    for act in (step.action, step.undo):
        if act and act.function and (objection := store.objection(act.function)):
            raise UnfitHandler(f"the step {step.name} of {saga_type}: {beginning(act.function)} {objection}")
