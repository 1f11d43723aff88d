"""The embedded broker as a source: one partition, read ahead of the position that the consumer has committed.

Processes of the same consumer do not share the log: every process receives all entries. The only cost is extra work,
because every process handles a key's events in order and the receipt lets a single process win.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from outrider.brokers.base import Revoked
from outrider.brokers.embedded.broker import EmbeddedBroker
from outrider.brokers.embedded.log import LogEntry
from outrider.brokers.offsets import AHEAD_MAX, OffsetTracker
from outrider.errors import Transient
from outrider.event import Delivery
from outrider.redaction import without_values

WAIT_SECONDS = 0.1
LOOK_SECONDS = 0.02
COMMIT_SECONDS = 0.5
log = logging.getLogger("outrider.embedded")


class EmbeddedSource:
    """Receives a consumer's deliveries from the log.

    A position in the log is `log/<offset>`::

        source = EmbeddedSource("events.db", "billing", ["orders"])
    """

    def __init__(self, path: str | Path, consumer: str, topics: Sequence[str]) -> None:
        self._log = EmbeddedBroker(path)
        self._consumer, self._topics = consumer, list(topics)
        self._positions: dict[str, int] = {}
        self._starts = 0
        self._progress: OffsetTracker | None = None
        self._commit_at = 0.0

    async def start(self, revoked: Revoked) -> None:
        """Open the log and go to the consumer's position. The only partition is never revoked."""
        await self._log.start()
        self._positions = await self._log.positions(self._consumer, self._topics)
        self._starts += 1
        self._progress = OffsetTracker()

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Return the received deliveries."""
        if self._progress is None:
            raise Transient("the source is not started, or was closed; start it")
        if time.monotonic() >= self._commit_at:
            await self._commit(self._progress)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            found = await self._look(self._progress, limit, paused)
            if found or time.monotonic() >= deadline:
                return [self._delivery(self._progress, entry) for entry in found]
            await asyncio.sleep(LOOK_SECONDS)

    def ack(self, delivery: Delivery) -> None:
        """Mark a delivery as done."""
        progress, number = delivery.token
        progress.done(number)

    async def close(self) -> None:
        """Commit the position and close the file."""
        progress, self._progress = self._progress, None
        try:
            if progress is not None:
                await self._commit(progress)
        except Transient as error:
            # Deliveries without a committed position come again, and the receipts absorb them.
            log.warning("the position of the consumer could not be committed", extra={"error": without_values(error)})
        finally:
            await self._log.close()

    @property
    def _partition(self) -> str:
        return f"log#{self._starts}"

    async def _look(self, progress: OffsetTracker, limit: int, paused: AbstractSet[str]) -> list[LogEntry]:
        if limit <= 0 or self._partition in paused or len(progress) >= AHEAD_MAX:
            return []
        found = await self._log.after_positions(self._positions, limit)
        if found:
            # All topics are read together in log order, so no topic has entries left up to this offset.
            last = found[-1].offset
            self._positions = {topic: max(position, last) for topic, position in self._positions.items()}
        return found

    def _delivery(self, progress: OffsetTracker, entry: LogEntry) -> Delivery:
        offset, message, _ = entry
        return Delivery(
            message.topic,
            _encode(message.key),
            message.body,
            {name: _encode(text) for name, text in message.headers.items()},
            self._partition,
            f"log/{offset}",
            (progress, progress.received(offset)),
        )

    async def _commit(self, progress: OffsetTracker) -> None:
        if (position := progress.uncommitted) is not None:
            # The log stores the last offset that is done; the offset tracker returns the first that is not.
            await self._log.commit(self._consumer, position - 1, self._topics)
            progress.committed(position)
        self._commit_at = time.monotonic() + COMMIT_SECONDS


def _encode(text: str) -> bytes:
    """Encode any text; decoding the delivery reports the error."""
    return text.encode(errors="surrogatepass")
