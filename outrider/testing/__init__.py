"""Test helpers for applications with Outrider and for Outrider's own test suite."""

from outrider.testing.fakes import ManualClock, MemoryBroker, RecordingObserver
from outrider.testing.saga_harness import SagaHarness

__all__ = ["ManualClock", "MemoryBroker", "RecordingObserver", "SagaHarness"]
