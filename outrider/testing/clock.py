"""A clock that only moves when a test says so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """Wall and boot time, moved together by hand.

    >>> clock = ManualClock()
    >>> clock.advance(seconds=90)
    >>> clock.boot_seconds()
    90.0
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._start = start or datetime(2030, 1, 1, tzinfo=UTC)
        self._elapsed = 0.0

    def now(self) -> datetime:
        """Return the wall time."""
        return self._start + timedelta(seconds=self._elapsed)

    def boot_seconds(self) -> float:
        """Return the seconds the test has let pass."""
        return self._elapsed

    def advance(self, *, seconds: float) -> None:
        """Let time pass."""
        self._elapsed += seconds
