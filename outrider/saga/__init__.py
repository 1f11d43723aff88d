"""Sagas: work of several services that completes, or undoes itself."""

from outrider.saga.barrier import Barrier, Refusal
from outrider.saga.definition import Saga
from outrider.saga.errors import AlreadyStarted, Refused
from outrider.saga.run import Reply, Run
from outrider.saga.sagas import Sagas
from outrider.saga.settings import SagaSettings
from outrider.saga.worker import SagaWorker

__all__ = [
    "AlreadyStarted",
    "Barrier",
    "Refusal",
    "Refused",
    "Reply",
    "Run",
    "Saga",
    "SagaSettings",
    "SagaWorker",
    "Sagas",
]
