"""Progress through a shard of a log, purely: what has been received, what of it is done, and what may be told.

A log remembers one place per consumer: everything before it is done. So only what has no gap before it may be told,
whatever the order in which things get done. Offsets may leap, since logs are compacted; what counts is the order in
which they were received.
"""

from __future__ import annotations

from collections import deque

AHEAD_MAX = 100_000
"""How many may be received behind one that is not done, before a source waits for it."""


class Progress:
    """Where a consumer stands in one shard.

    >>> progress = Progress()
    >>> first, second = progress.received(17), progress.received(19)
    >>> progress.done(second)
    >>> progress.untold is None
    True
    >>> progress.done(first)
    >>> progress.untold
    20
    """

    def __init__(self) -> None:
        self._received = 0
        self._oldest = 0
        self._last_offset = -1
        self._waiting: deque[int] = deque()
        self._done: set[int] = set()
        self._told: int | None = None

    def __len__(self) -> int:
        """Count what was received and cannot be told yet."""
        return len(self._waiting)

    def received(self, offset: int) -> int:
        """Note that an offset was received; return the number under which it is to be reported done.

        The number is not the offset: after a log was cut short, another message may have the same one.
        """
        if self._told is None:
            self._told = offset
        self._waiting.append(offset)
        self._last_offset = offset
        self._received += 1
        return self._received - 1

    def done(self, number: int) -> None:
        """Note that what was received under a number is done. A second time changes nothing."""
        if not self._oldest <= number < self._received:
            return
        self._done.add(number)
        while self._oldest in self._done:
            self._done.discard(self._oldest)
            self._waiting.popleft()
            self._oldest += 1

    @property
    def place(self) -> int | None:
        """Return the offset to go on from after a crash: everything received before it is done."""
        if self._received == 0:
            return None
        return self._waiting[0] if self._waiting else self._last_offset + 1

    @property
    def untold(self) -> int | None:
        """Return the place if the broker does not know it yet."""
        return self.place if self.place != self._told else None

    def tell(self, place: int) -> None:
        """Note that the broker has taken down a place."""
        self._told = place
