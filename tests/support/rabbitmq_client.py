"""Another client's view of RabbitMQ, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika

from outrider.event import Message
from tests.contract.broker.test_rabbitmq import read_back


@asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    """Another client's channel."""
    async with await aio_pika.connect(url) as connection, await connection.channel() as channel:
        yield channel


async def contents(url: str, queue: str) -> list[Message]:
    """Return what a queue holds."""
    async with await aio_pika.connect(url) as connection:
        return await read_back(connection, queue, "")
