"""The inbox as a service uses it: handlers by decorator, or one delivery at a time by hand."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from outrider.codec.open import open_delivery
from outrider.delivery import Delivery, InboxStream
from outrider.errors import Misuse, Transient
from outrider.inbox import turns
from outrider.inbox.calling import HandlerFailed
from outrider.inbox.router import Handler, Route, Router, Routes
from outrider.inbox.settings import ConsumerSettings, changed
from outrider.inbox.turns import Turns
from outrider.inbox_store import Applied, Buried, Dropped, InboxStore, Stalled, Waits

DRAIN_MAX = 100


class Result(StrEnum):
    """What became of a delivery. In each case it is committed, and the caller may ack."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    DROPPED = "dropped"
    WAITING = "waiting"
    BURIED = "buried"


_RESULTS = {Applied: Result.APPLIED, Dropped: Result.DROPPED, Waits: Result.WAITING, Buried: Result.BURIED}


class Inbox(Router):
    """Handlers whose effects happen exactly once.

    Register handlers and run them with `outrider consume module:inbox`::

        inbox = Inbox()

        @inbox.handler("order.placed", consumer="billing")
        async def bill(event, conn):
            await conn.execute("INSERT INTO invoices (order_id) VALUES ($1)", event.aggregate_id)

    With `transactions`, a factory of SQLAlchemy's sessions for instance, handlers get a transaction of that kind::

        inbox = Inbox(transactions=async_sessionmaker(engine))

    Or keep your own loop, give the inbox a store, and call `process` for every delivery.
    """

    def __init__(self, store: InboxStore | None = None, *, transactions: Any = None) -> None:
        super().__init__()
        if store is not None and transactions is not None:
            raise Misuse(
                "an inbox with a store lends what that does; open the store with transactions=…, not the inbox"
            )
        self.store, self.transactions = store, transactions

    def consumer(self, name: str, settings: ConsumerSettings | None = None, **options: Any) -> None:
        """Set how a consumer works: its gate, retries, batches and limits.

        >>> Inbox().consumer("billing", gate="strict", batch_max=100)
        """
        super().consumer(name, changed(settings or ConsumerSettings(), options))

    async def process(self, delivery: Delivery, handler: Handler, *, consumer: str) -> Result:
        """Handle one delivery in a transaction with its receipt; ack when this returns.

        What the handler raises is raised here, and has left no trace: do not ack, and deliver again. A malformed
        delivery goes to the consumer's dead letters::

            result = await inbox.process(delivery, bill, consumer="billing")
        """
        store, routes = self._by_hand(handler, consumer)
        arrival = open_delivery(delivery)
        try:
            done = await turns.commit(store, routes, turns.arrivals_of(store, routes, [arrival]))
            # A second delivery may be all that is left of one whose followers failed: they are waiting still.
            for stream in [*done.draining, *(each.stream for each in done.duplicates)]:
                await _drain(store, routes, stream)
        except HandlerFailed as failed:
            raise failed.error from None
        return _result(done)

    async def drain(self, consumer: str, handler: Handler) -> int:
        """Let waiting events go that may: after `outrider inbox replay`, `discard` or `release`. Return how many did.

        Call it now and then beside `process`, with a handler that takes every type. What it raises is raised here, and
        the event waits on::

            handled = await inbox.drain("billing", bill)
        """
        store, routes = self._by_hand(handler, consumer)
        handled, met = 0, set[InboxStream]()
        try:
            while streams := await _may_go(store, routes, met):
                met |= streams
                for stream in streams:
                    handled += await _drain(store, routes, stream)
        except HandlerFailed as failed:
            raise failed.error from None
        return handled

    def _by_hand(self, handler: Handler, consumer: str) -> tuple[InboxStore, Routes]:
        if self.store is None:
            raise Misuse("this inbox has no store; make it with Inbox(store), or run: outrider consume module:inbox")
        settings = self.consumers[consumer].settings if consumer in self.consumers else ConsumerSettings()
        routes = Routes(consumer, settings, otherwise=Route(handler))
        routes.check(self.store)
        return self.store, routes


async def _drain(store: InboxStore, routes: Routes, stream: InboxStream) -> int:
    """Let waiting events of a stream go with the same handler; return how many it has handled."""
    handled, draining = 0, True
    while draining:
        done = await turns.commit(store, routes, turns.waiting_of(store, routes, stream, 1))
        handled += len(done.of(Applied))
        draining = bool(done.draining)
    return handled


async def _may_go(store: InboxStore, routes: Routes, met: set[InboxStream]) -> set[InboxStream]:
    """Find streams that drain. Those met before are another's by now, or fill again as fast as they drain."""
    found: set[InboxStream] = set()
    for cause in routes.settings.drains:
        found |= set(await store.draining(routes.consumer, DRAIN_MAX + len(met), cause=cause))
    return found - met


def _result(done: Turns) -> Result:
    if not done.entries:
        return Result.DUPLICATE
    conclusion = done.entries[0].conclusion
    if isinstance(conclusion, Stalled):
        raise Transient("too many events of this stream wait already; do not ack, and deliver again later")
    return _RESULTS[type(conclusion)]
