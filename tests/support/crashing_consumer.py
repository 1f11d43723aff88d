"""A consumer process that kills itself with SIGKILL at a chosen point of its work.

    python -m tests.support.crashing_consumer PARENT STORE BROKER TOPIC POINT COUNT SETTINGS

It dies when it passes the point for the COUNT-th time; with the point `never` it works until it is stopped. The points
are in the order of the work, and each wraps the real thing: the store, the source, the transaction. Only passes with an
effect count: a delivery that was handled before proves nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Any

from outrider import app
from outrider.brokers.base import Source
from outrider.cli.processes import die_with_parent
from outrider.event import Delivery, Event, ReceivedEvent
from outrider.handler_transactions import HandlerTransaction, WrappedTransaction
from outrider.inbox.consumer import Consumer
from outrider.inbox.inbox import Inbox
from outrider.inbox.model import Receipts
from outrider.inbox.store import InboxStore

POINTS = ("received", "receipt_written", "in_handler", "handler_done", "commit_sent", "committed_not_acked")
NEVER = "never"
TYPE = "order.placed"
TABLE = (
    "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, event_id uuid NOT NULL, key text NOT NULL, "
    "sequence bigint NOT NULL)"
)
"""Nothing in it forbids a second effect: it must be seen, if there is one."""
EFFECT = "INSERT INTO effects (event_id, key, sequence) VALUES ($1, $2, $3)"


class Fuse:
    """Counts passes of one point, and blows at the last one."""

    def __init__(self, point: str, count: int) -> None:
        self._point, self._left = point, count
        self.handled: set[str] = set()
        """The events whose handler has run in this process."""

    def due(self, point: str) -> bool:
        """Tell whether this pass is the one."""
        if point != self._point:
            return False
        self._left -= 1
        return self._left == 0

    def burn(self, point: str) -> None:
        """Die here, if it is time to."""
        if self.due(point):
            os.kill(os.getpid(), signal.SIGKILL)


class FusedStore:
    """A store with a fuse in it; what is not about a point goes straight through."""

    def __init__(self, store: InboxStore, fuse: Fuse) -> None:
        self._store, self._fuse = store, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        context = self._store.transaction()
        tx = FusedTransaction(await context.__aenter__(), self, self._fuse)
        try:
            yield tx
        except BaseException:
            await context.__aexit__(*sys.exc_info())
            raise
        committing = asyncio.ensure_future(context.__aexit__(None, None, None))
        if tx.worked and self._fuse.due("commit_sent"):
            # The first step of the commit writes it to the socket; the answer is never read.
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGKILL)
        await committing

    async def record_receipts(
        self, tx: Any, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool
    ) -> Receipts:
        admitted = await self._store.record_receipts(tx, consumer, events, ordered=ordered)
        if admitted.fresh:
            self._fuse.burn("receipt_written")
        return admitted

    def handling(self, argument: Any) -> None:
        """Hear of an event that a handler is about to get."""


class FusedTransaction(WrappedTransaction):
    """A transaction with a fuse in it."""

    def __init__(self, inner: HandlerTransaction, store: FusedStore, fuse: Fuse) -> None:
        super().__init__(inner)
        self._store, self._fuse = store, fuse
        self.worked = False

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        self._store.handling(argument)
        self.worked = True
        returned = await super().call(function, argument)
        self._fuse.burn("handler_done")
        return returned


class FusedSource:
    """A source with a fuse in it."""

    def __init__(self, source: Source, fuse: Fuse) -> None:
        self._source, self._fuse = source, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        received = await self._source.receive(limit, paused)
        for _ in received:
            self._fuse.burn("received")
        return received

    def ack(self, delivery: Delivery) -> None:
        if delivery.headers["message_id"].decode() in self._fuse.handled:
            self._fuse.burn("committed_not_acked")
        self._source.ack(delivery)


def build(topic: str, fuse: Fuse, **settings: Any) -> Inbox:
    """Make the inbox: one effect per event, written with its number."""
    inbox = Inbox()
    consumer = consumer_of(topic)
    inbox.consumer(consumer, **settings)

    @inbox.handler(TYPE, consumer=consumer, topic=topic)
    async def bill(event: Event, conn: Any) -> None:
        fuse.handled.add(str(event.event_id))
        await conn.execute(EFFECT, event.event_id, event.key, event.sequence)
        fuse.burn("in_handler")

    return inbox


def consumer_of(topic: str) -> str:
    """Name the consumer of a topic: a broker that tests share knows it for ever."""
    return f"of-{topic}"


async def main(store_url: str, broker_url: str, topic: str, fuse: Fuse, **settings: Any) -> None:
    """Consume until killed, by the fuse or from outside."""
    routes = build(topic, fuse, **settings).consumers[consumer_of(topic)]
    store = FusedStore(await app.open_inbox(store_url), fuse)
    source = FusedSource(app.open_source(broker_url, routes), fuse)
    consumer = Consumer(source, store, routes, observer=app.log_observer())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
    await consumer.run()
    await store.close()


if __name__ == "__main__":
    [parent, store_url, broker_url, topic, point, count, said] = sys.argv[1:]
    die_with_parent(int(parent))
    app.configure_logging(json=True, level="INFO")
    asyncio.run(main(store_url, broker_url, topic, Fuse(point, int(count)), **json.loads(said)))
