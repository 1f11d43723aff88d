"""A key with a large backlog beside other keys, on PostgreSQL and RabbitMQ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

import outrider
from outrider import Event, Relay, RelaySettings
from outrider.brokers.base import CONFIRMED, PublishResult, Unanswered
from outrider.brokers.rabbitmq import RabbitBroker
from outrider.event import Message
from outrider.stores.postgres import PostgresStore
from outrider.testing.harness import numbers
from tests.support.running_relay import SignallingObserver

pytestmark = [pytest.mark.postgres, pytest.mark.rabbitmq]

HOT, OTHERS = 4000, 200
HOT_BEFORE, HOT_BETWEEN_MAX = 300, 2000


class TimedBroker(RabbitBroker):
    """A broker that records the confirmed messages, in order, with the time of the confirm."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.log: list[Message] = []
        self.times: list[float] = []
        self.begun = asyncio.Event()

    async def publish_promptly(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        return self._recorded(messages, await super().publish_promptly(messages))

    async def publish_apart(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        return self._recorded(messages, await super().publish_apart(messages))

    def _recorded(self, messages: Sequence[Message], results: Sequence[PublishResult]) -> Sequence[PublishResult]:
        for message, result in zip(messages, results, strict=True):
            if isinstance(result, Unanswered):
                result.answer.add_done_callback(partial(self._answered, message))
            else:
                self._record(message, result)
        return results

    def _answered(self, message: Message, answer: asyncio.Future[PublishResult]) -> None:
        self._record(message, answer.result())

    def _record(self, message: Message, result: PublishResult) -> None:
        if result != CONFIRMED:
            return
        self.log.append(message)
        self.times.append(time.monotonic())
        if len(self.log) >= HOT_BEFORE:
            self.begun.set()


async def test_a_hot_key_does_not_delay_other_keys_of_its_worker_or_its_lane(
    store: PostgresStore, conn: Any, rabbitmq_url: str
) -> None:
    name, observer = f"test_{uuid4().hex[:12]}", SignallingObserver()
    broker = TimedBroker(rabbitmq_url, exchange=name, declare=True, queues=((name, "#"),))
    control = RabbitBroker(rabbitmq_url, exchange=name)
    await broker.start()
    await _stage(conn, ["hot"] * HOT)
    relay = Relay(store, broker, RelaySettings(), observer=observer)
    running = asyncio.create_task(relay.run())

    async def settled() -> bool:
        return bool(await conn.fetchval("SELECT count(*) FROM outrider.outbox") == 0)

    try:
        await broker.begun.wait()
        await _stage(conn, [f"other{n}" for n in range(OTHERS)])
        relay.wake()
        staged, before = time.monotonic(), len(broker.log)
        shared = await conn.fetchval(
            "SELECT count(*) FROM outrider.outbox WHERE key <> 'hot' AND lane IN "
            "(SELECT lane FROM outrider.outbox WHERE key = 'hot')"
        )
        control_seconds = await _control(control)
        await observer.until(settled)
    finally:
        relay.stop()
        await running
        await control.close()
        await broker.close()
    seconds = sorted(at - staged for message, at in zip(broker.log, broker.times, strict=True) if message.key != "hot")
    last = max(index for index, message in enumerate(broker.log) if message.key != "hot")
    between = sum(message.key == "hot" for message in broker.log[before:last])
    p50, p90 = seconds[OTHERS // 2], seconds[OTHERS * 9 // 10]
    print(
        f"{HOT} events of a hot key in {broker.times[-1] - broker.times[0]:.1f} s; {OTHERS} other keys, {shared} in "
        f"its lane: p50 {p50:.3f} s, p90 {p90:.3f} s, max {seconds[-1]:.3f} s, {between} hot events before the last; "
        f"control publisher: max {control_seconds:.3f} s"
    )
    assert shared
    assert between <= HOT_BETWEEN_MAX
    assert numbers(broker.log, "hot") == list(range(HOT))
    assert len(broker.log) == HOT + OTHERS


async def _control(control: RabbitBroker) -> float:
    """Publish messages one by one beside the relay; return the longest time to a confirm."""
    longest = 0.0
    for number in range(50):
        started = time.monotonic()
        message = Message(str(uuid4()), "control", str(number), None, b"{}", {})
        assert await control.publish([message]) == [CONFIRMED]
        longest = max(longest, time.monotonic() - started)
    return longest


async def _stage(conn: Any, keys: list[str]) -> None:
    async with conn.transaction():
        await outrider.stage(
            conn, *(Event("order.placed", {"n": n}, topic="orders", key=key) for n, key in enumerate(keys))
        )
