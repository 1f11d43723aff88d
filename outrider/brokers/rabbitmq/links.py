"""The links of a broker: one while there is anything to do, and more of them while there is much.

The server works off what a connection sends in one process, and holds that back when a queue is slow. With more than
one it gets more done: a fifth, for a quorum queue on two cores. Further links are opened in the background and given
back when they are idle. Any of them will do, so a server that takes no more connections from us is not taken for one
that is down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from operator import attrgetter

from outrider.brokers.rabbitmq.link import Link
from outrider.brokers.rabbitmq.protocol import Wire, connect
from outrider.brokers.rabbitmq.publisher import Destination
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import OutriderError, Transient
from outrider.event import Message
from outrider.outcome import Unresolved, Verdict

BUSY_MESSAGES = 100
"""With so many under way on every link, another one is worth its connection."""
REST_SECONDS = 60.0
"""How long no further link is tried, after one could not be had."""
IDLE_SECONDS = 30.0
"""A further link that nobody has used for so long is given back: another relay may be waiting for it."""

log = logging.getLogger("outrider.rabbitmq")
_under_way = attrgetter("under_way")


class Links:
    """Spreads waves over connections. No stream has an event in two waves at once, so order does not depend on it."""

    def __init__(self, settings: RabbitSettings, destination: Destination) -> None:
        self._settings, self._destination = settings, destination
        self._links: list[Link] = []
        self._connecting = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rest_until = float("-inf")

    def __len__(self) -> int:
        """How many connections are up."""
        return sum(not link.wire.lost for link in self._links)

    async def publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[Verdict | None]:
        """Publish through the link with the least under way."""
        try:
            link = await self.quietest()
        except Transient as error:
            return [Unresolved(str(error))] * len(messages)
        if link.under_way >= BUSY_MESSAGES:
            self._grow()
        return await link.publish(exchange, messages)

    async def quietest(self) -> Link:
        """Return the link with the least under way; if there is none, connect."""
        async with self._connecting:
            self._links = [link for link in self._links if not link.wire.lost]
            if not self._links:
                link = await self._connected()
                self._links.append(link)
            link = min(self._links, key=_under_way)
            link.used_at = asyncio.get_running_loop().time()
            return link

    async def wire(self) -> Wire:
        """Return a connection that the server has not blocked; it blocks whoever publishes, if it blocks anybody."""
        link = await self.quietest()
        for blocked in (one.wire.blocked for one in self._links if not one.wire.lost):
            if blocked:
                raise Transient(blocked)
        return link.wire

    async def close(self) -> None:
        """Disconnect all."""
        async with self._connecting:
            tasks, self._tasks = self._tasks, {}
            for task in tasks.values():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks.values())
            links, self._links = self._links, []
        for link in links:
            await link.wire.close()

    async def _connected(self) -> Link:
        return Link(await connect(self._settings), self._settings, self._destination)

    def _grow(self) -> None:
        """Open another link, unless there are enough, or one could not be had a moment ago."""
        resting = asyncio.get_running_loop().time() < self._rest_until
        if len(self) < self._settings.connections_max and not resting:
            self._start("open", self._open)

    def _start(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work())

    async def _open(self) -> None:
        try:
            link = await self._connected()
        except OutriderError as error:
            self._rest_until = asyncio.get_running_loop().time() + REST_SECONDS
            log.info("no further connection could be had", extra={"has": len(self), "why": str(error)})
        else:
            self._links.append(link)
            self._start("give back", self._give_back)

    async def _give_back(self) -> None:
        """Close further links as they fall idle, until one is left."""
        while len(self._links) > 1:
            await asyncio.sleep(IDLE_SECONDS)
            # Closing one takes a while, and another may be in use by then: so they are looked at one by one.
            while link := self._idle():
                self._links.remove(link)
                try:
                    await link.wire.close()
                finally:
                    link.wire.abort("given back")

    def _idle(self) -> Link | None:
        before = asyncio.get_running_loop().time() - IDLE_SECONDS
        return next((link for link in self._links[1:] if not link.under_way and link.used_at <= before), None)
