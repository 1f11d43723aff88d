"""Outages of the services that steps call: one circuit breaker for each step and phase, in a worker process.

Some unavailable results in a row open the breaker of a step. Meanwhile sagas at the step wait without a call, and a
single saga at a time probes the service, at growing intervals. The first answer of the service closes the breaker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.circuit_breaker import CircuitBreaker
from outrider.clock import Clock
from outrider.saga.definition.steps import base_name
from outrider.saga.model import Phase
from outrider.saga.planner.actions import (
    Action,
    CallAction,
    LocalAction,
    Outage,
    RejectedResult,
    Result,
    Succeeded,
    UnavailableResult,
)
from outrider.saga.planner.journal import StepKey
from outrider.saga.settings import SagaSettings
from outrider.telemetry.events import Observer, SagaStepAvailable, SagaStepUnavailable


@dataclass(slots=True)
class StepBreaker:
    """The breaker of a step in one phase, for all its items, and the unavailable results in a row."""

    breaker: CircuitBreaker
    unavailable: int = 0
    opened_at: float = 0.0


@dataclass(slots=True)
class StepOutages:
    """The steps of a worker whose services did not work lately. Services that work take no memory."""

    settings: SagaSettings
    observer: Observer
    clock: Clock
    _steps: dict[tuple[str, str, Phase], StepBreaker] = field(default_factory=dict)

    def current(self, saga_type: str) -> dict[StepKey, Outage]:
        """Return the steps that must not be tried now, or of which one attempt may probe the service."""
        if not self._steps:
            return {}
        now, outages = self.clock.boot_seconds(), dict[StepKey, Outage]()
        for (known, step, phase), found in self._steps.items():
            if known == saga_type and found.breaker.retry_at is not None:
                seconds = found.breaker.retry_at - now
                is_due = seconds <= 0
                seconds = self.settings.breaker_seconds_base if is_due else seconds
                outages[step, phase] = Outage(found.breaker.error, seconds, is_due)
        return outages

    def started(self, saga_type: str, actions: Iterable[Action]) -> None:
        """Let only one saga through as the probe of an open breaker: the other sagas wait for the next interval.

        A probe that is lost with its turn delays the next probe by one interval, and blocks nothing.
        """
        if not self._steps:
            return
        for action in actions:
            found = self._steps.get((saga_type, base_name(action.step), action.phase))
            if found and found.breaker.is_open and isinstance(action, CallAction | LocalAction):
                found.breaker.open(found.breaker.error, self.clock.boot_seconds())

    def record(self, saga_type: str, result: Result) -> None:
        """Record the result of an attempt. An error or a timeout proves neither an outage nor its end."""
        key = saga_type, base_name(result.step), result.phase
        if isinstance(result, UnavailableResult):
            self._unavailable(key, result)
        elif isinstance(result, Succeeded | RejectedResult):
            found = self._steps.pop(key, None)
            if found and found.breaker.is_open:
                seconds = self.clock.boot_seconds() - found.opened_at
                self.observer.emit(SagaStepAvailable(*key, round(seconds, 3)))

    def _unavailable(self, key: tuple[str, str, Phase], result: UnavailableResult) -> None:
        settings, now = self.settings, self.clock.boot_seconds()
        if (found := self._steps.get(key)) is None:
            breaker = CircuitBreaker(settings.breaker_seconds_base, settings.breaker_seconds_max)
            found = self._steps[key] = StepBreaker(breaker)
        found.unavailable += 1
        if found.breaker.is_open:
            # The probe has set the next interval when it started; calls from before the opening say nothing new.
            found.breaker.error = result.error
        elif found.unavailable >= settings.breaker_failures:
            found.breaker.open(result.error, now)
            found.opened_at = now
            seconds = (found.breaker.retry_at or now) - now
            self.observer.emit(SagaStepUnavailable(*key, result.error, round(seconds, 3)))
