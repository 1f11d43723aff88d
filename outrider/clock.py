"""Time, as a value that tests can own.

Leases are decided by database time alone. The relay's own clock serves one purpose: to stop publishing before its
lease can have ended. That clock must go on counting while the machine is suspended, hence boot time.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """The clock of the engines."""

    def now(self) -> datetime:
        """Return the wall time, in UTC."""
        ...

    def boot_seconds(self) -> float:
        """Return seconds since boot, suspended time included; only differences mean anything."""
        ...


class SystemClock:
    """The machine's clocks.

    >>> SystemClock().now().tzname()
    'UTC'
    """

    def now(self) -> datetime:
        """Return the wall time, in UTC."""
        return datetime.now(UTC)

    def boot_seconds(self) -> float:
        """Return seconds since boot, suspended time included."""
        return time.clock_gettime(_BOOT_CLOCK)


# macOS has no CLOCK_BOOTTIME; there the monotonic clock counts through sleep already.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
