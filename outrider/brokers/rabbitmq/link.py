"""A link: one connection to publish through, with a channel for every exchange it publishes to.

It does not connect again: one whose connection is lost is of no use any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outrider.brokers.rabbitmq.protocol import Wire
from outrider.brokers.rabbitmq.publisher import Destination, Publisher, Wave
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import Transient
from outrider.event import Message
from outrider.outcome import Unresolved, Verdict

PUBLISHERS_MAX = 256


class Link:
    """One connection, and who publishes on it.

    `under_way` counts messages that wait for their verdicts; `used_at` is when anybody last had to do with it.
    """

    def __init__(self, wire: Wire, settings: RabbitSettings, destination: Destination) -> None:
        self.wire = wire
        self._settings, self._destination = settings, destination
        self._publishers: dict[str, Publisher] = {}
        self._opening = asyncio.Lock()
        self.under_way = 0
        self.used_at = asyncio.get_running_loop().time()

    async def publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[Verdict | None]:
        """Send messages in one write, and wait for the confirms."""
        self.under_way += len(messages)
        try:
            return await self._publish(exchange, messages)
        finally:
            self.under_way -= len(messages)
            self.used_at = asyncio.get_running_loop().time()

    async def _publish(self, exchange: str, messages: Sequence[Message]) -> Sequence[Verdict | None]:
        try:
            publisher = await self._publisher(exchange)
            self.wire.check()
        except Transient as error:
            return [Unresolved(str(error))] * len(messages)
        wave = publisher.publish(messages, self._settings.route)
        try:
            await self._wait(wave)
        finally:
            # A caller that gave up must not leave its messages behind: a late confirm then finds nobody.
            if wave.left:
                publisher.forget(wave)
        return wave.verdicts

    async def _wait(self, wave: Wave) -> None:
        """Wait for the wave. If time runs out, a silent server is down; one that speaks has a queue that is."""
        half = self._settings.confirm_seconds / 2
        if (await asyncio.wait([wave.done], timeout=half))[0]:
            return
        asked = asyncio.get_running_loop().time()
        self.wire.ping()
        if (await asyncio.wait([wave.done], timeout=half))[0]:
            return
        if self.wire.heard_at < asked:
            self.wire.abort(f"nothing was heard from the server for {half:g} s")
        for index, message in enumerate(wave.messages):
            if wave.verdicts[index] is None:
                destination = self._destination(message)
                error = f"no confirm from {destination} within {2 * half:g} s"
                wave.verdicts[index] = Unresolved(error, destination)

    async def _publisher(self, exchange: str) -> Publisher:
        """Return the exchange's channel, opened if need be; of too many, one that has been idle is closed."""
        async with self._opening:
            self.wire.check()
            found = self._publishers.pop(exchange, None)
            if found is None or not found.open:
                self._make_room()
                found = Publisher(self.wire, exchange, self._destination, self._settings.make_exchange)
                await found.start()
            # Put back last: the order of the table is the order of use.
            self._publishers[exchange] = found
            return found

    def _make_room(self) -> None:
        if len(self._publishers) < PUBLISHERS_MAX:
            return
        for exchange, publisher in self._publishers.items():
            if publisher.idle:
                del self._publishers[exchange]
                publisher.close()
                return
