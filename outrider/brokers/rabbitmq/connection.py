"""An AMQP connection: framing, handshake, heartbeats, method calls and answers.

A connection ends only once. Then `lost` has the reason, every call in progress raises, and every channel is notified.
The server's answers to published messages go to the channel of the messages.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Protocol, cast

from pamqp import base, commands, frame, header, heartbeat

from outrider.brokers.rabbitmq.frames import HEADER, METHOD
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import Transient, Unreachable

GREETING = b"AMQP\x00\x00\x09\x01"
CAPABILITIES = (
    "publisher_confirms",
    "basic.nack",
    "connection.blocked",
    "authentication_failure_close",
    "consumer_cancel_notify",
)
CLOSE_SECONDS = 1.0
CHANNELS_MAX = 2047
FRAME_END = 0xCE

_FRAME = struct.Struct(">BHI")
_ACK = struct.pack(">HH", 60, 80)
_TAG = struct.Struct(">QB")


class ChannelClosed(Transient):
    """The server closed a channel; `code` and text come from the server."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Receiver(Protocol):
    """Gets the server's answers on a channel."""

    def confirm(self, tag: int, *, multiple: bool, accepted: bool) -> None:
        """Handle the ack or nack of a message, or of all messages up to the tag."""
        ...

    def returned(self, message_id: str, text: str) -> None:
        """Handle the return of an unroutable message; the confirm follows."""
        ...

    def closed(self, error: ChannelClosed) -> None:
        """Handle the closing of the channel by the server."""
        ...

    def fail(self, error: str) -> None:
        """Handle the end of the connection: no more answers will come."""
        ...


class AmqpConnection(asyncio.Protocol):
    """A connection, made by `connect`."""

    def __init__(self, settings: RabbitSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._receivers: dict[int, Receiver] = {}
        self._replies: dict[int, asyncio.Future[base.Frame]] = {}
        self._returning: dict[int, commands.Basic.Return] = {}
        self._free: list[int] = []
        self._closing: set[int] = set()
        self._next_channel = 1
        self._channels_max = CHANNELS_MAX
        self._heartbeat_seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = self.received_at = self._loop.time()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.frame_bytes_max = settings.frame_bytes_max
        self.lost = self.blocked = self.server_version = ""
        self.is_stuck = False

    async def call(self, channel: int, method: base.Frame) -> base.Frame:
        """Send a method and return the answer. Without an answer in time the connection is aborted."""
        self.check()
        reply: asyncio.Future[base.Frame] = self._loop.create_future()
        self._replies[channel] = reply
        self.send(channel, method)
        seconds = self._settings.confirm_seconds
        try:
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError:
            self.abort(f"no answer to {method.name} within {seconds:g} s")
            raise Unreachable(self.lost) from None
        except asyncio.CancelledError:
            self.abort(f"{method.name} was given up")
            raise
        finally:
            self._replies.pop(channel, None)

    def check(self) -> None:
        """Raise if the connection accepts no messages now."""
        if self.lost:
            raise Unreachable(self.lost)
        if self.blocked:
            raise Transient(self.blocked)

    async def open_channel(self, receiver: Receiver | None = None) -> int:
        """Open a channel and return its number."""
        number = self._next_number()
        await self.call(number, commands.Channel.Open())
        if receiver is not None:
            self._receivers[number] = receiver
        return number

    async def is_answering(self, seconds: float) -> bool:
        """Return whether the server reads the connection: open a channel, and wait for the answer.

        The server stops reading a connection that has sent too much to a queue which does not answer.
        """
        number = self._next_number()
        reply = self._replies[number] = self._loop.create_future()
        self.send(number, commands.Channel.Open())
        try:
            await asyncio.wait([reply], timeout=seconds)
        finally:
            self._replies.pop(number, None)
            self.close_channel(number)
        return reply.done() and reply.exception() is None

    def close_channel(self, number: int) -> None:
        """Close a channel; the number is free again after the server's answer."""
        self._receivers.pop(number, None)
        self._closing.add(number)
        self.send(number, commands.Channel.Close(200, "done", 0, 0))

    def send(self, channel: int, method: base.Frame) -> None:
        """Send a method without waiting for an answer."""
        self.write(frame.marshal(method, channel))

    def write(self, data: bytes) -> None:
        """Send frames."""
        if self._transport is not None and not self.lost:
            self._sent_at = self._loop.time()
            self._transport.write(data)

    async def close(self) -> None:
        """Close the connection in the AMQP way, and wait briefly for the answer."""
        if not self.lost and not self.blocked:
            self.send(0, commands.Connection.Close(200, "done", 0, 0))
            reply = self._replies[0] = self._loop.create_future()
            await asyncio.wait([reply], timeout=CLOSE_SECONDS)
            # After a cancellation or an error, no caller waits for the answer.
            if not reply.cancel():
                reply.exception()
        self.abort("closed by us")

    def abort(self, reason: str) -> None:
        """End the connection now."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the protocol header."""
        self._transport = cast(asyncio.Transport, transport)
        self.write(GREETING)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the loss of the transport."""
        self._end(f"the connection was lost ({exc or 'closed by the server'})")

    def data_received(self, data: bytes) -> None:
        """Process the complete frames."""
        self.received_at = self._loop.time()
        self._buffer += data
        try:
            del self._buffer[: self._read_frames(self._buffer)]
        except Exception as error:
            # After unreadable data the position in the stream is lost, so later data cannot be trusted.
            self.abort(f"the server sent what cannot be read: {type(error).__name__}: {error}")

    def _next_number(self) -> int:
        number = self._free.pop() if self._free else self._next_channel
        if number == self._next_channel:
            self._next_channel += 1
        if number > self._channels_max:
            raise Transient(f"all {self._channels_max} channels of the connection are in use")
        return number

    def _read_frames(self, buffer: bytearray) -> int:
        start = 0
        while len(buffer) - start >= _FRAME.size:
            kind, channel, size = _FRAME.unpack_from(buffer, start)
            if kind not in (1, 2, 3, 8):
                raise ValueError("not AMQP 0-9-1")
            end = start + _FRAME.size + size
            if len(buffer) <= end:
                break
            if buffer[end] != FRAME_END:
                raise ValueError("a frame has no end")
            self._frame(kind, channel, bytes(buffer[start : end + 1]))
            start = end + 1
        return start

    def _frame(self, kind: int, channel: int, raw: bytes) -> None:
        if kind == METHOD and raw[7:11] == _ACK:
            tag, bits = _TAG.unpack_from(raw, 11)
            if receiver := self._receivers.get(channel):
                receiver.confirm(tag, multiple=bool(bits & 1), accepted=True)
        elif kind == METHOD:
            method = cast(base.Frame, frame.unmarshal(raw)[2])
            (self._connection_method if channel == 0 else self._channel_method)(channel, method)
        elif kind == HEADER and channel in self._returning:
            content = cast(header.ContentHeader, frame.unmarshal(raw)[2])
            self._return(channel, self._returning.pop(channel), content)

    def _connection_method(self, channel: int, method: base.Frame) -> None:
        match method:
            case commands.Connection.Start():
                self._log_in(method)
            case commands.Connection.Tune():
                self._tune(method)
            case commands.Connection.OpenOk():
                if not self.opened.done():
                    self.opened.set_result(None)
            case commands.Connection.Close():
                self.send(0, commands.Connection.CloseOk())
                self.abort(f"the server closed the connection: {method.reply_code} {method.reply_text}")
            case commands.Connection.Blocked():
                self._block(f"blocked: {method.reason}")
            case commands.Connection.Unblocked():
                self.blocked = ""
            case _:
                self._answer(channel, method)

    def _channel_method(self, channel: int, method: base.Frame) -> None:
        match method:
            case commands.Basic.Nack():
                if receiver := self._receivers.get(channel):
                    receiver.confirm(method.delivery_tag, multiple=method.multiple, accepted=False)
            case commands.Basic.Return():
                self._returning[channel] = method
            case commands.Channel.Close():
                self._channel_closed(channel, method)
            case commands.Channel.CloseOk():
                self._closing.discard(channel)
                self._free.append(channel)
            case _:
                self._answer(channel, method)

    def _log_in(self, start: commands.Connection.Start) -> None:
        self.server_version = str((start.server_properties or {}).get("version", ""))
        if "PLAIN" not in start.mechanisms.split():
            self.abort(f"the server offers {start.mechanisms} to log in, and we know PLAIN")
            return
        response = f"\0{self._settings.user}\0{self._settings.password}"
        properties: dict[str, Any] = {"product": "outrider", "capabilities": dict.fromkeys(CAPABILITIES, True)}
        self.send(0, commands.Connection.StartOk(properties, "PLAIN", response, "en_US"))

    def _tune(self, offer: commands.Connection.Tune) -> None:
        """Accept the server's limits where they are lower; 0 means no limit."""
        self.frame_bytes_max = min(self.frame_bytes_max, offer.frame_max or self.frame_bytes_max)
        self._channels_max = min(CHANNELS_MAX, offer.channel_max or CHANNELS_MAX)
        heartbeat = min(self._settings.heartbeat_seconds, offer.heartbeat or self._settings.heartbeat_seconds)
        self.send(0, commands.Connection.TuneOk(self._channels_max, self.frame_bytes_max, heartbeat))
        self.send(0, commands.Connection.Open(self._settings.vhost))
        self._heartbeat_seconds = float(heartbeat)
        self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        """Send a heartbeat, and check the server's: the protocol allows two intervals of silence."""
        now, interval = self._loop.time(), self._heartbeat_seconds
        if now - self.received_at > 2 * interval:
            self.abort(f"the server has been silent for {now - self.received_at:.0f} s")
            return
        if now - self._sent_at >= interval / 2:
            self.write(heartbeat.Heartbeat.marshal())
        self._timer = self._loop.call_later(interval / 2, self._send_heartbeat)

    def _block(self, reason: str) -> None:
        """Handle a blocked connection: the server stops reading, so waiting for messages in flight is useless."""
        self.blocked = reason
        for receiver in self._receivers.values():
            receiver.fail(reason)
        self._break_calls(Transient(reason))

    def _return(self, channel: int, method: commands.Basic.Return, content: header.ContentHeader) -> None:
        if receiver := self._receivers.get(channel):
            where = f"exchange {method.exchange!r}, routing key {method.routing_key!r}"
            receiver.returned(content.properties.message_id or "", f"{method.reply_text} ({where})")

    def _channel_closed(self, channel: int, method: commands.Channel.Close) -> None:
        self.send(channel, commands.Channel.CloseOk())
        self._returning.pop(channel, None)
        if channel not in self._closing:
            self._free.append(channel)
        error = ChannelClosed(method.reply_code or 0, method.reply_text)
        if receiver := self._receivers.pop(channel, None):
            receiver.closed(error)
        reply = self._replies.get(channel)
        if reply is not None and not reply.done():
            reply.set_exception(error)

    def _answer(self, channel: int, method: base.Frame) -> None:
        reply = self._replies.get(channel)
        if reply is not None and not reply.done():
            reply.set_result(method)

    def _break_calls(self, error: Transient) -> None:
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    def _end(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        if self._timer is not None:
            self._timer.cancel()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.fail(reason)
        self._break_calls(Unreachable(reason))
        if not self.opened.done():
            self.opened.set_exception(Unreachable(reason))


async def connect(settings: RabbitSettings) -> AmqpConnection:
    """Open a connection, or raise Unreachable."""
    connection = AmqpConnection(settings)
    await open_connection(connection, settings)
    return connection


async def open_connection(connection: AmqpConnection, settings: RabbitSettings) -> None:
    """Open a connection of any class, or raise Unreachable."""
    loop, context = asyncio.get_running_loop(), settings.ssl_context()
    try:
        async with asyncio.timeout(settings.connect_seconds):
            await loop.create_connection(lambda: connection, settings.host, settings.port, ssl=context)
            await connection.opened
    except (OSError, Unreachable) as error:
        reason = f"no handshake within {settings.connect_seconds:g} s" if isinstance(error, TimeoutError) else error
        raise Unreachable(
            f"RabbitMQ at {settings.address} cannot be used ({reason}); check address, credentials and virtual host"
        ) from error
    finally:
        if not connection.opened.done():
            connection.opened.cancel()
        if connection.opened.cancelled() or connection.opened.exception():
            connection.abort("the connection was given up")
