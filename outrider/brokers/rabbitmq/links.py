"""The links of a broker: one, and more of them while there is much to do.

The server works off what a connection sends in one process, and holds that back when a queue is slow. With more than
one it gets more done: a fifth, for a quorum queue on two cores. Nobody depends on the others: they are opened
in the background while much is under way, and one that is lost is not missed. So a server that takes no more
connections from us is not taken for one that is down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from operator import attrgetter

from outrider.brokers.rabbitmq.link import Link
from outrider.brokers.rabbitmq.publisher import Destination
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import Transient
from outrider.event import Message
from outrider.outcome import Verdict

BUSY_MESSAGES = 100
"""With so many under way on every link, another one is worth its connection."""
REST_SECONDS = 60.0
"""How long no other link is tried, after one could not be had."""

log = logging.getLogger("outrider.rabbitmq")
_under_way = attrgetter("under_way")


class Links:
    """Spreads waves over connections. No stream has an event in two waves at once, so order does not depend on it."""

    def __init__(self, settings: RabbitSettings, destination: Destination) -> None:
        self._settings, self._destination = settings, destination
        self.first = Link(settings, destination)
        self._others: list[Link] = []
        self._growing: asyncio.Task[None] | None = None
        self._rest_until = float("-inf")

    async def publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[Verdict | None]:
        """Publish through the link with the least under way."""
        self._others = [link for link in self._others if not link.lost]
        link = min((self.first, *self._others), key=_under_way)
        if link.under_way >= BUSY_MESSAGES:
            self._grow()
        link.under_way += len(messages)
        try:
            return await link.publish(exchange, messages)
        finally:
            link.under_way -= len(messages)

    def check(self) -> None:
        """Raise if the server has blocked any of them: it blocks whoever publishes."""
        for link in (self.first, *self._others):
            if link.blocked:
                raise Transient(link.blocked)

    async def close(self) -> None:
        """Disconnect all."""
        growing, self._growing = self._growing, None
        if growing is not None:
            growing.cancel()
            await asyncio.wait([growing])
        others, self._others = self._others, []
        for link in (*others, self.first):
            await link.close()

    def _grow(self) -> None:
        """Open another link, unless there are enough, one is being opened, or one could not be had a moment ago."""
        enough = 1 + len(self._others) >= self._settings.connections_max
        resting = asyncio.get_running_loop().time() < self._rest_until
        if not enough and not resting and (self._growing is None or self._growing.done()):
            self._growing = asyncio.create_task(self._open())

    async def _open(self) -> None:
        link = Link(self._settings, self._destination)
        try:
            await link.wire()
        except Transient as error:
            self._rest_until = asyncio.get_running_loop().time() + REST_SECONDS
            log.info("no further connection could be had", extra={"has": 1 + len(self._others), "why": str(error)})
        else:
            self._others.append(link)
