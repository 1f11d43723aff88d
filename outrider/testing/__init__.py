"""Help for testing: what an application's tests, and our own, need around Outrider."""

from outrider.testing.broker import MemoryBroker
from outrider.testing.clock import ManualClock
from outrider.testing.observer import Notebook
from outrider.testing.sagas import SagaHarness

__all__ = ["ManualClock", "MemoryBroker", "Notebook", "SagaHarness"]
