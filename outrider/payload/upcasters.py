"""Upcasters: pure functions that lead a payload from an old version of its event type to the current version."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidPayload, UsageError
from outrider.event import DeadLetterReason
from outrider.payload.model import Version, required_version, version_order

Upcast = Callable[[Any], Any]
"""Takes the payload of an old version, and returns the payload of the next version."""


@dataclass(frozen=True, slots=True)
class Upcaster:
    """One step: from a version of an event type to a later version.

    >>> def add_currency(payload):
    ...     return {**payload, "currency": "EUR"}
    >>> Upcaster("order.placed", 1, 2, add_currency).target
    2
    """

    event_type: str
    source: Version
    target: Version
    function: Upcast

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            object.__setattr__(self, name, required_version(getattr(self, name), f"an upcaster of {self.event_type}"))
        if version_order(self.source) >= version_order(self.target):
            raise UsageError(
                f"an upcaster of {self.event_type} leads from version {self.source} to {self.target}; let it lead to a "
                "later version"
            )


class UpcasterChains:
    """The upcasters by event type. The current version of a type is the last version to which an upcaster leads."""

    def __init__(self, upcasters: Iterable[Upcaster] | Mapping[str, Mapping[int, Upcast]] = ()) -> None:
        self._steps: dict[str, dict[Version, Upcaster]] = {}
        for step in _listed(upcasters):
            known = self._steps.setdefault(step.event_type, {})
            if step.source in known:
                raise UsageError(
                    f"{step.event_type} has two upcasters from version {step.source}; a chain has one step from each "
                    "version"
                )
            known[step.source] = step

    @property
    def event_types(self) -> list[str]:
        """Return the types with upcasters."""
        return sorted(self._steps)

    def current(self, event_type: str) -> Version | None:
        """Return the current version of a type, None for a type without upcasters."""
        steps = self._steps.get(event_type)
        return max((step.target for step in steps.values()), key=version_order) if steps else None

    def check(self, event_type: str, known: Iterable[Version]) -> None:
        """Reject a chain that does not lead every version of a type to the current version.

        The versions are those with a schema, and all whole numbers below the current version.
        """
        if (current := self.current(event_type)) is None:
            return
        versions = {version for version in known if version_order(version) <= version_order(current)}
        versions |= self._steps[event_type].keys()
        if isinstance(current, int):
            versions |= set(range(1, current))
        for version in sorted(versions, key=version_order):
            missing = self._missing_step(event_type, version, current)
            if missing is not None:
                raise UsageError(
                    f"{event_type} version {version} does not open as the current version {current}: there is no "
                    f"upcaster from version {missing}; add Upcaster({event_type!r}, {missing!r}, …)"
                )

    def _missing_step(self, event_type: str, version: Version, current: Version) -> Version | None:
        steps = self._steps[event_type]
        while version != current:
            if version not in steps:
                return version
            version = steps[version].target
        return None

    def upcast(self, event_type: str, version: Version, payload: Any) -> tuple[Version, Any]:
        """Return the current version and the payload in it. The functions get a copy, so the argument is unchanged."""
        steps = self._steps.get(event_type)
        if steps is None:
            return version, payload
        current = self.current(event_type)
        if version == current:
            return version, payload
        payload = copy.deepcopy(payload)
        while version != current:
            step = steps.get(version)
            if step is None:
                raise InvalidPayload(
                    "schema_version",
                    f"{event_type} version {version} does not open as the current version {current}: there is no "
                    "upcaster for it",
                    DeadLetterReason.SCHEMA_VALIDATION_FAILED,
                )
            try:
                payload = step.function(payload)
            except Exception as error:
                # Without the text of the error, which may repeat the payload.
                raise InvalidPayload(
                    "payload",
                    f"the upcaster of {event_type} from version {version} to {step.target} raised "
                    f"{type(error).__name__}",
                    DeadLetterReason.SCHEMA_VALIDATION_FAILED,
                ) from error
            version = step.target
        return version, payload


def _listed(upcasters: Iterable[Upcaster] | Mapping[str, Mapping[int, Upcast]]) -> Iterable[Upcaster]:
    """Return the steps; a mapping gives the function from each version to the next version of its type.

    >>> [(step.source, step.target) for step in _listed({"order.placed": {1: dict, 2: dict}})]
    [(1, 2), (2, 3)]
    """
    if not isinstance(upcasters, Mapping):
        for step in upcasters:
            if not isinstance(step, Upcaster):
                raise UsageError(f"{step!r:.80} is no upcaster; write Upcaster('order.placed', 1, 2, function)")
            yield step
        return
    for event_type, functions in upcasters.items():
        for source, function in functions.items():
            if not isinstance(source, int):
                raise UsageError(
                    f"{event_type}: the version after {source!r} is not known; write "
                    f"Upcaster({event_type!r}, {source!r}, next, function)"
                )
            yield Upcaster(event_type, source, source + 1, function)
