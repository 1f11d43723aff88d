"""Helpers for tests of the RabbitMQ source: a reader, another client, and ways to break the connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pamqp import commands

from outrider.brokers.base import CONFIRMED
from outrider.brokers.rabbitmq import RabbitBroker, RabbitSettings, RabbitSource
from outrider.brokers.rabbitmq.connection import connect
from outrider.errors import Transient
from outrider.event import Message
from outrider.testing.contracts import Reader, message
from outrider.testing.servers.rabbitmq import RabbitServer

PATIENCE_SECONDS = 40.0
QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
SINGLE: dict[str, Any] = {"x-single-active-consumer": True}


def source_of(server: RabbitServer, name: str, **options: Any) -> RabbitSource:
    """Make a source whose exchange and queue have the test's name."""
    return RabbitSource(server.url, name, ["orders"], **{"exchange": name, "declare": True, **options})


@asynccontextmanager
async def reading(source: RabbitSource) -> AsyncIterator[Reader]:
    """Start a source, and close it at the end."""
    reader = Reader(source)
    await source.start(reader.on_revoked)
    try:
        yield reader
    finally:
        await source.close()


async def loss(reader: Reader) -> str:
    """Receive until the connection is lost; return what is said about it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await reader.receive()
            except Transient as error:
                return str(error)


def pull_out(reader: Reader) -> None:
    """Cut the connection at our end, without a word to the server."""
    assert isinstance(reader.source, RabbitSource)
    assert reader.source._connection is not None
    reader.source._connection.abort("pulled out")


async def restart(reader: Reader) -> None:
    """Start again, as often as it takes."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await reader.source.start(reader.on_revoked)
            except Transient:
                # A server that comes up has nothing to wait for but itself.
                await asyncio.sleep(0.1)


async def publish(broker: RabbitBroker, *numbers: int, key: str = "A") -> list[Message]:
    """Publish numbered messages of one key."""
    sent = [message(n, topic="orders", key=key) for n in numbers]
    assert list(await broker.publish(sent)) == [CONFIRMED] * len(sent)
    return sent


async def nobody(partitions: frozenset[str]) -> None:
    """Nothing is under way."""


async def publish_raw(server: RabbitServer, exchange: str, flags: int, properties: bytes) -> None:
    """Publish properties as no decent client would."""
    wire = await connect(RabbitSettings.from_url(server.url))
    number = await wire.open_channel()
    method = struct.pack(">HHH", 60, 40, 0) + short(exchange.encode()) + short(b"orders") + b"\0"
    content = struct.pack(">HHQH", 60, 0, 2, flags) + properties
    for kind, payload in ((1, method), (2, content), (3, b"{}")):
        wire.write(struct.pack(">BHI", kind, number, len(payload)) + payload + b"\xce")
    # The answer to a later request shows that the server has read the earlier frames.
    await wire.call(number, commands.Exchange.Declare(exchange=exchange, passive=True))
    await wire.close()


def short(text: bytes) -> bytes:
    return bytes((len(text),)) + text


def table(fields: bytes) -> bytes:
    return struct.pack(">I", len(fields)) + fields
