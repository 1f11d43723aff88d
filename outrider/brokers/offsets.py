"""Tracks received and acked offsets of one partition and returns the offset that is safe to commit. No I/O.

A log stores one position per consumer: everything before the position is done. Therefore an offset may be committed
only when all offsets received before are done, whatever the order of the acks. Offsets may skip numbers, since logs are
compacted; the order of receipt counts.
"""

from __future__ import annotations

from collections import deque

AHEAD_MAX = 100_000
"""Number of deliveries received after an unfinished delivery before a source waits."""


class OffsetTracker:
    """The progress of a consumer in a partition.

    >>> progress = OffsetTracker()
    >>> first, second = progress.received(17), progress.received(19)
    >>> progress.done(second)
    >>> progress.uncommitted is None
    True
    >>> progress.done(first)
    >>> progress.uncommitted
    20
    """

    def __init__(self) -> None:
        self._received = 0
        self._oldest = 0
        self._last_offset = -1
        self._pending: deque[int] = deque()
        self._done: set[int] = set()
        self._committed: int | None = None

    def __len__(self) -> int:
        """Return the number of received offsets that cannot be committed yet."""
        return len(self._pending)

    def received(self, offset: int) -> int:
        """Record a received offset; return the number to pass to `done`.

        The number differs from the offset: after the log was truncated, another message may have the same offset.
        """
        if self._committed is None:
            self._committed = offset
        self._pending.append(offset)
        self._last_offset = offset
        self._received += 1
        return self._received - 1

    def done(self, number: int) -> None:
        """Mark the offset with the number as done. Repeated calls have no effect."""
        if not self._oldest <= number < self._received:
            return
        self._done.add(number)
        while self._oldest in self._done:
            self._done.discard(self._oldest)
            self._pending.popleft()
            self._oldest += 1

    @property
    def position(self) -> int | None:
        """Return the offset to continue from after a crash: everything received before is done."""
        if self._received == 0:
            return None
        return self._pending[0] if self._pending else self._last_offset + 1

    @property
    def uncommitted(self) -> int | None:
        """Return the position if not committed to the broker yet, else None."""
        return self.position if self.position != self._committed else None

    def committed(self, position: int) -> None:
        """Record that the broker has stored a position."""
        self._committed = position
