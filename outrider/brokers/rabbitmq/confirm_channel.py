"""Publishing on one channel: a wave in one write, and confirms matched with their messages.

Every exchange has separate channels, because the server answers a bad publish by closing the channel: then only the
messages on this channel have unknown results. A channel never reuses a delivery tag, so a late confirm, after the
caller has given up, is recognised and ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pamqp import commands

from outrider.brokers.base import CONFIRMED, PublishResult, Rejected, Unanswered, Unknown
from outrider.brokers.rabbitmq.connection import AmqpConnection, ChannelClosed
from outrider.brokers.rabbitmq.frames import Unsendable, encode
from outrider.errors import Transient
from outrider.event import Message

ACCESS_REFUSED, NOT_FOUND = 403, 404
EXCHANGE_ERRORS = (ACCESS_REFUSED, NOT_FOUND)
"""Reply codes that concern the exchange: every message to the exchange would get the same reply."""

Route = Callable[[Message], tuple[str, str]]
Destination = Callable[[Message], str]


class ChannelProgress:
    """The time of the last answer to messages of one channel name, on any connection."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = float("-inf")


class ConfirmBatch:
    """Messages in flight, and the results so far."""

    __slots__ = ("_answers", "done", "left", "messages", "results")

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._answers: dict[int, asyncio.Future[PublishResult]] = {}
        self.results: list[PublishResult | None] = [None] * len(messages)
        self.left = len(messages)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self, index: int, result: PublishResult) -> None:
        """Record a result; only the first result of a message counts."""
        if self.results[index] is None:
            self.results[index] = result
        if (answer := self._answers.pop(index, None)) is not None and not answer.done():
            answer.set_result(self.results[index] or result)
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)

    def leave(self, destination: Destination) -> Sequence[PublishResult | None]:
        """Return the results so far; messages without a result are `Unanswered`, and get their result later."""
        results = list(self.results)
        for index, result in enumerate(results):
            if result is None:
                answer = self._answers[index] = asyncio.get_running_loop().create_future()
                results[index] = Unanswered(destination(self.messages[index]), answer)
        return results

    def give_up(self, result_of: Callable[[Message], PublishResult]) -> None:
        """Settle the messages without a result."""
        for index, result in enumerate(self.results):
            if result is None:
                self.settle(index, result_of(self.messages[index]))


class ConfirmChannel:
    """The channel of an exchange, in confirm mode. `make_exchange` is the remedy for a missing exchange."""

    def __init__(
        self,
        connection: AmqpConnection,
        destination: Destination,
        make_exchange: str,
        progress: ChannelProgress,
    ) -> None:
        self._connection, self._destination = connection, destination
        self._make_exchange, self.progress = make_exchange, progress
        self._number = 0
        self._next_tag = self._lowest = 1
        self._pending: dict[int, tuple[ConfirmBatch, int]] = {}
        self.open = False

    async def start(self) -> None:
        """Open the channel and ask for confirms."""
        self._number = await self._connection.open_channel(self)
        try:
            await self._connection.call(self._number, commands.Confirm.Select())
        except Transient:
            self.close()
            raise
        self.open = True

    def close(self) -> None:
        """Close the channel."""
        self.open = False
        self._connection.close_channel(self._number)

    @property
    def idle(self) -> bool:
        """Return whether no message is in flight."""
        return not self._pending

    def publish(self, messages: Sequence[Message], route: Route) -> ConfirmBatch:
        """Write messages at once. A message that does not fit AMQP is rejected here, without effect on the others."""
        wave = ConfirmBatch(messages)
        frames: list[bytes] = []
        limit = self._connection.frame_bytes_max
        for index, message in enumerate(messages):
            try:
                frames.append(encode(message, self._number, *route(message), limit))
            except Unsendable as error:
                wave.settle(index, Rejected(f"RabbitMQ cannot take the message: {error}"))
                continue
            self._pending[self._next_tag] = (wave, index)
            self._next_tag += 1
        self._connection.write(b"".join(frames))
        return wave

    def forget(self, wave: ConfirmBatch) -> None:
        """Stop waiting for a wave."""
        for tag in [tag for tag, (owner, _) in self._pending.items() if owner is wave]:
            del self._pending[tag]

    def confirm(self, tag: int, *, multiple: bool, accepted: bool) -> None:
        """Record the result of a message, or of all messages up to the tag."""
        self.progress.at = self._connection.received_at
        if multiple:
            for number in range(self._lowest, tag + 1):
                self._confirm(number, accepted)
            self._lowest = tag + 1
        else:
            self._confirm(tag, accepted)

    def _confirm(self, tag: int, accepted: bool) -> None:
        if (found := self._pending.pop(tag, None)) is None:
            return
        wave, index = found
        if accepted:
            wave.settle(index, CONFIRMED)
        else:
            # RabbitMQ does not nack a message for its content, but because a queue is full or broken.
            destination = self._destination(wave.messages[index])
            wave.settle(index, Unknown(f"nacked: a queue behind {destination} is full or broken", destination))

    def returned(self, message_id: str, text: str) -> None:
        """Reject an unroutable message. The server also confirms the message, but later; the first result counts."""
        for wave, index in self._pending.values():
            if wave.messages[index].message_id == message_id and wave.results[index] is None:
                topic = wave.messages[index].topic
                remedy = f"bind a queue for it, then: outrider dead-letters replay --topic {topic}"
                wave.results[index] = Rejected(f"unroutable: {text}; {remedy}")
                return

    def closed(self, error: ChannelClosed) -> None:
        """Find the cause of a closed channel: a message is rejected only if sent alone to a working exchange."""
        self.open = False
        isolated = len(self._pending) == 1 and error.code not in EXCHANGE_ERRORS
        text = f"the server closed the channel: {error.code} {error}"
        text += f"; {self._make_exchange}" if error.code == NOT_FOUND else ""
        self._settle_all(lambda message: Rejected(text) if isolated else Unknown(text, self._destination(message)))

    def fail(self, error: str) -> None:
        """Record an unknown result for all messages in flight.

        If the server answers on another connection, a destination without an answer is the cause, and not the server.
        """
        stuck = self._connection.is_stuck
        self._settle_all(lambda message: Unknown(error, self._destination(message) if stuck else ""))

    def _settle_all(self, result_of: Callable[[Message], PublishResult]) -> None:
        pending, self._pending = self._pending, {}
        for wave, index in pending.values():
            wave.settle(index, result_of(wave.messages[index]))
