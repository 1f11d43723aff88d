"""The embedded broker as a source: one shard, read ahead of the place that the consumer has committed.

Processes of one consumer do not share the log: each receives everything. That costs work and nothing else, because
each takes a key's events in order and the receipt lets one of them win.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from outrider.brokers.embedded.broker import EmbeddedBroker
from outrider.brokers.embedded.log import Entry
from outrider.brokers.progress import AHEAD_MAX, Progress
from outrider.delivery import Delivery
from outrider.errors import Transient
from outrider.source import Revoked

WAIT_SECONDS = 0.1
LOOK_SECONDS = 0.02
TELL_SECONDS = 0.5
log = logging.getLogger("outrider.embedded")


class EmbeddedSource:
    """Receives a consumer's deliveries from the log.

    A place in the log is `log/<offset>`::

        source = EmbeddedSource("events.db", "billing", ["orders"])
    """

    def __init__(self, path: str | Path, consumer: str, topics: Sequence[str]) -> None:
        self._log = EmbeddedBroker(path)
        self._consumer, self._topics = consumer, list(topics)
        self._places: dict[str, int] = {}
        self._starts = 0
        self._progress: Progress | None = None
        self._tell_at = 0.0

    async def start(self, revoked: Revoked) -> None:
        """Open the log and go to the consumer's place. Nobody takes its only shard away."""
        await self._log.start()
        self._places = await self._log.places(self._consumer, self._topics)
        self._starts += 1
        self._progress = Progress()

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Return what has come."""
        if self._progress is None:
            raise Transient("the source is not started, or was closed; start it")
        if time.monotonic() >= self._tell_at:
            await self._tell(self._progress)
        give_up = time.monotonic() + WAIT_SECONDS
        while True:
            found = await self._look(self._progress, limit, paused)
            if found or time.monotonic() >= give_up:
                return [self._delivery(self._progress, entry) for entry in found]
            await asyncio.sleep(LOOK_SECONDS)

    def ack(self, delivery: Delivery) -> None:
        """Note that a delivery is done."""
        progress, number = delivery.token
        progress.done(number)

    async def close(self) -> None:
        """Commit what is done, and close the file."""
        progress, self._progress = self._progress, None
        try:
            if progress is not None:
                await self._tell(progress)
        except Transient as error:
            # What is not told comes again, and the receipts absorb it.
            log.warning("the consumer's place could not be told", extra={"error": str(error)})
        finally:
            await self._log.close()

    @property
    def _shard(self) -> str:
        return f"log#{self._starts}"

    async def _look(self, progress: Progress, limit: int, paused: AbstractSet[str]) -> list[Entry]:
        if limit <= 0 or self._shard in paused or len(progress) >= AHEAD_MAX:
            return []
        found = await self._log.behind(self._places, limit)
        if found:
            # Topics are read together in the order of the log, so none has anything left up to this offset.
            last = found[-1].offset
            self._places = {topic: max(place, last) for topic, place in self._places.items()}
        return found

    def _delivery(self, progress: Progress, entry: Entry) -> Delivery:
        offset, message, _ = entry
        return Delivery(
            message.topic,
            _encode(message.key),
            message.body,
            {name: _encode(text) for name, text in message.headers.items()},
            self._shard,
            f"log/{offset}",
            (progress, progress.received(offset)),
        )

    async def _tell(self, progress: Progress) -> None:
        if (place := progress.untold) is not None:
            # The log counts the last one that is done, and progress the first one that is not.
            await self._log.commit(self._consumer, place - 1, self._topics)
            progress.tell(place)
        self._tell_at = time.monotonic() + TELL_SECONDS


def _encode(text: str) -> bytes:
    """Encode anything; opening a delivery says what is wrong with it."""
    return text.encode(errors="surrogatepass")
