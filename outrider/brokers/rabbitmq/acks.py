"""What is acked and not yet told, purely: as few acks on the wire as will do.

An ack of several stands for everything up to it, so it is used where nothing before it is still open; what is done
behind something open is acked by itself. No delivery is acked twice: the server would close the channel.
"""

from __future__ import annotations

from collections import deque


class Acks:
    """The deliveries of one channel that the server waits for.

    >>> acks = Acks()
    >>> for tag in (1, 2, 3, 4, 5): acks.delivered(tag)
    >>> for tag in (5, 2, 1, 2): acks.done(tag)
    >>> acks.take()
    [(2, True), (5, False)]
    """

    def __init__(self) -> None:
        self._line: deque[int] = deque()
        self._open: set[int] = set()
        self._done: set[int] = set()

    def delivered(self, tag: int) -> None:
        """Note a delivery; tags rise."""
        self._line.append(tag)
        self._open.add(tag)

    def done(self, tag: int) -> None:
        """Note that a delivery is done. What is done already, or was never delivered, is ignored."""
        if tag in self._open:
            self._open.remove(tag)
            self._done.add(tag)

    def take(self) -> list[tuple[int, bool]]:
        """Return what to tell: the tag, and whether it stands for everything up to it."""
        upto = count = 0
        while self._line and self._line[0] not in self._open:
            tag = self._line.popleft()
            # What was told by itself has left already, and still stands in the line.
            if tag in self._done:
                self._done.remove(tag)
                upto, count = tag, count + 1
        singles = sorted(self._done)
        self._done.clear()
        return [*([(upto, count > 1)] if count else []), *((tag, False) for tag in singles)]
