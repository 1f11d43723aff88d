"""One channel that consumes one queue: frames come in, deliveries and acks go out.

A subscription ends once and for all. Whatever ends it, `lost` says why; what was delivered on it and is not acked comes
again on another.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence

from outrider.brokers.rabbitmq.acks import Acks
from outrider.brokers.rabbitmq.fields import read_content
from outrider.brokers.rabbitmq.frames import FRAME_END, HEADER, METHOD
from outrider.brokers.rabbitmq.protocol import ChannelClosed, Wire
from outrider.delivery import Delivery

_DELIVER, _CANCEL = struct.pack(">HH", 60, 60), struct.pack(">HH", 60, 30)
_PAYLOAD, _ARGUMENTS = 7, 11
"""Where the payload of a frame begins, and where the arguments of a method do."""
_TAG = struct.Struct(">Q")
_ACK = struct.Struct(">BHIHHQB")
_ACK_BYTES = 13


class Subscription:
    """What has come over one channel and was not given out, and what is acked and was not told.

    `per_topic` says that every topic has an exchange of its own: then a message without our headers is of the topic
    that its exchange names, and its routing key is its key; else its routing key names its topic.
    """

    def __init__(self, shard: str, *, per_topic: bool = False) -> None:
        self.shard, self._per_topic = shard, per_topic
        self.lost = ""
        self.news = asyncio.Event()
        self._arrived: deque[Delivery] = deque()
        self._acks = Acks()
        self._tag, self._exchange, self._routing_key = 0, b"", b""
        self._headers: dict[str, bytes] = {}
        self._pieces: list[bytes] = []
        self._missing_bytes = 0

    @property
    def count(self) -> int:
        """Return how many deliveries wait to be given out."""
        return len(self._arrived)

    def give(self, limit: int) -> list[Delivery]:
        """Give out what came first."""
        return [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]

    def ack(self, tag: int) -> None:
        """Note that a delivery is done."""
        self._acks.done(tag)
        self.news.set()

    def frames(self, channel: int) -> bytes:
        """Return the acks that were not told yet, as frames."""
        told: Sequence[tuple[int, bool]] = self._acks.take()
        return b"".join(
            _ACK.pack(METHOD, channel, _ACK_BYTES, 60, 80, tag, multiple) + FRAME_END for tag, multiple in told
        )

    def take(self, kind: int, raw: bytes) -> bool:
        """Take a frame of the channel, or tell that it is none of ours."""
        if kind == METHOD:
            method = raw[_PAYLOAD:_ARGUMENTS]
            if method == _DELIVER:
                self._begin(raw)
            elif method == _CANCEL:
                self.fail("the server cancelled the consumer: the queue was deleted, or is moving")
            return method in (_DELIVER, _CANCEL)
        payload = raw[_PAYLOAD:-1]
        if kind == HEADER:
            self._missing_bytes, self._headers = read_content(payload)
        else:
            self._pieces.append(payload)
            self._missing_bytes -= len(payload)
        if self._missing_bytes <= 0:
            self._complete()
        return True

    def confirm(self, tag: int, *, multiple: bool, taken: bool) -> None:
        """Nothing is published here, so nothing is confirmed."""

    def returned(self, message_id: str, text: str) -> None:
        """Nothing is published here, so nothing is returned."""

    def closed(self, error: ChannelClosed) -> None:
        """The server closed the channel, and takes no more acks on it."""
        self._acks = Acks()
        self.fail(f"the server closed the channel: {error.code} {error}")

    def fail(self, error: str) -> None:
        """Nothing more will come."""
        self.lost = self.lost or error
        self.news.set()

    def _begin(self, raw: bytes) -> None:
        at = _ARGUMENTS + 1 + raw[_ARGUMENTS]
        (self._tag,) = _TAG.unpack_from(raw, at)
        at += _TAG.size + 1
        exchange_end = at + 1 + raw[at]
        self._exchange = raw[at + 1 : exchange_end]
        self._routing_key = raw[exchange_end + 1 : exchange_end + 1 + raw[exchange_end]]
        self._pieces = []

    def _complete(self) -> None:
        headers, body = self._headers, b"".join(self._pieces)
        self._pieces, self._headers = [], {}
        origin = self._exchange if self._per_topic else self._routing_key
        topic = headers.get("topic", origin).decode(errors="backslashreplace")
        key = headers.get("key", self._routing_key if self._per_topic else None)
        self._acks.delivered(self._tag)
        self._arrived.append(Delivery(topic, key, body, headers, self.shard, "", self._tag))
        self.news.set()


class Intake(Wire):
    """A connection whose channels may consume."""

    def _frame(self, kind: int, channel: int, raw: bytes) -> None:
        receiver = self._receivers.get(channel)
        if not (isinstance(receiver, Subscription) and receiver.take(kind, raw)):
            super()._frame(kind, channel, raw)
