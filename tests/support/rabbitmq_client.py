"""Another client's view of RabbitMQ, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika

from outrider.event import Message


@asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    """Another client's channel."""
    async with await aio_pika.connect(url) as connection, await connection.channel() as channel:
        yield channel


async def contents(url: str, queue: str) -> list[Message]:
    """Return what a queue holds."""
    async with await aio_pika.connect(url) as connection:
        return await read_back(connection, queue, "")


async def read_back(reader: aio_pika.abc.AbstractConnection, queue: str, topic: str) -> list[Message]:
    """Take what is in a queue now; it is put back when the channel closes."""
    found: list[Message] = []
    async with await reader.channel() as channel:
        source = await channel.get_queue(queue, ensure=False)
        while (taken := await source.get(fail=False)) is not None:
            assert taken.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
            headers = {name: str(value) for name, value in taken.headers.items()}
            found.append(Message(taken.message_id or "", topic, headers["key"], None, taken.body, headers))
    return found
