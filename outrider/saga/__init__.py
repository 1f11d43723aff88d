"""Sagas: steps in several services, with compensation after a failure."""

from outrider.errors import AlreadyStarted, StepRejected, StepUnavailable
from outrider.saga.context import Reply, StepContext
from outrider.saga.definition.saga import Saga, SagaRegistry
from outrider.saga.execution.worker import SagaWorker
from outrider.saga.participant import Participant, Rejection
from outrider.saga.settings import SagaSettings

__all__ = [
    "AlreadyStarted",
    "Participant",
    "Rejection",
    "Reply",
    "Saga",
    "SagaRegistry",
    "SagaSettings",
    "SagaWorker",
    "StepContext",
    "StepRejected",
    "StepUnavailable",
]
