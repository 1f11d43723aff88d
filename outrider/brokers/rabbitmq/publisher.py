"""Publishing on one channel: a wave in one write, confirms counted back to their messages.

Each exchange has a channel of its own, because the server answers a bad publish by closing the channel: then only
messages to that exchange are in doubt. Delivery tags are never used twice on a channel, so the confirm of a message
that nobody waits for any more is recognised, and ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pamqp import commands

from outrider.brokers.rabbitmq.frames import Unsendable, encode
from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire
from outrider.errors import Transient
from outrider.event import Message
from outrider.outcome import CONFIRMED, Rejected, Unresolved, Verdict

ACCESS_REFUSED, NOT_FOUND = 403, 404
OF_THE_EXCHANGE = (ACCESS_REFUSED, NOT_FOUND)
"""Replies that say something about the exchange: every message to it would meet the same."""

Route = Callable[[Message], tuple[str, str]]
Destination = Callable[[Message], str]


class Wave:
    """Messages on their way, and what is known of them."""

    __slots__ = ("done", "left", "messages", "verdicts")

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.verdicts: list[Verdict | None] = [None] * len(messages)
        self.left = len(messages)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self, index: int, verdict: Verdict) -> None:
        """Note a verdict; the first word on a message counts."""
        if self.verdicts[index] is None:
            self.verdicts[index] = verdict
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)


class Publisher:
    """The channel of one exchange, in confirm mode. `make_exchange` is the remedy for one that is not there."""

    def __init__(self, wire: Wire, exchange: str, destination: Destination, make_exchange: str) -> None:
        self._wire, self._exchange, self._destination = wire, exchange, destination
        self._make_exchange = make_exchange
        self._number = 0
        self._next_tag = self._lowest = 1
        self._pending: dict[int, tuple[Wave, int]] = {}
        self.open = False

    async def start(self) -> None:
        """Open the channel and ask for confirms."""
        self._number = await self._wire.open_channel(self)
        try:
            await self._wire.call(self._number, commands.Confirm.Select())
        except Transient:
            self.close()
            raise
        self.open = True

    def close(self) -> None:
        """Close the channel."""
        self.open = False
        self._wire.close_channel(self._number)

    @property
    def idle(self) -> bool:
        """Tell whether nothing is on its way."""
        return not self._pending

    def publish(self, messages: Sequence[Message], route: Route) -> Wave:
        """Write messages at once. What AMQP has no room for is rejected here, and does not disturb the others."""
        wave = Wave(messages)
        frames: list[bytes] = []
        limit = self._wire.frame_bytes_max
        for index, message in enumerate(messages):
            try:
                frames.append(encode(message, self._number, *route(message), limit))
            except Unsendable as error:
                wave.settle(index, Rejected(f"RabbitMQ cannot take the message: {error}"))
                continue
            self._pending[self._next_tag] = (wave, index)
            self._next_tag += 1
        self._wire.write(b"".join(frames))
        return wave

    def forget(self, wave: Wave) -> None:
        """Wait no longer for a wave."""
        for tag in [tag for tag, (owner, _) in self._pending.items() if owner is wave]:
            del self._pending[tag]

    def confirm(self, tag: int, *, multiple: bool, taken: bool) -> None:
        """Settle a message, or all up to it."""
        if multiple:
            for number in range(self._lowest, tag + 1):
                self._confirm(number, taken)
            self._lowest = tag + 1
        else:
            self._confirm(tag, taken)

    def _confirm(self, tag: int, taken: bool) -> None:
        if (found := self._pending.pop(tag, None)) is None:
            return
        wave, index = found
        if taken:
            wave.settle(index, CONFIRMED)
        else:
            # RabbitMQ does not nack a message for what is in it, but because a queue is full or broken.
            destination = self._destination(wave.messages[index])
            wave.settle(index, Unresolved(f"nacked: a queue behind {destination} is full or broken", destination))

    def returned(self, message_id: str, text: str) -> None:
        """Reject an unroutable message. The server confirms it all the same, so the verdict is noted before that."""
        for wave, index in self._pending.values():
            if wave.messages[index].message_id == message_id and wave.verdicts[index] is None:
                topic = wave.messages[index].topic
                remedy = f"bind a queue for it, then: outrider dead replay --topic {topic}"
                wave.verdicts[index] = Rejected(f"unroutable: {text}; {remedy}")
                return

    def closed(self, error: ChannelClosed) -> None:
        """Find out whom the server meant: a message is guilty only if it was alone, and the exchange is fine."""
        self.open = False
        alone = len(self._pending) == 1 and error.code not in OF_THE_EXCHANGE
        text = f"the server closed the channel: {error.code} {error}"
        text += f"; {self._make_exchange}" if error.code == NOT_FOUND else ""
        self._settle_all(lambda message: Rejected(text) if alone else Unresolved(text, self._destination(message)))

    def fail(self, error: str) -> None:
        """Nothing is known of what is on its way."""
        self._settle_all(lambda message: Unresolved(error))

    def _settle_all(self, judge: Callable[[Message], Verdict]) -> None:
        pending, self._pending = self._pending, {}
        for wave, index in pending.values():
            wave.settle(index, judge(wave.messages[index]))
