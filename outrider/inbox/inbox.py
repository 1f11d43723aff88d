"""The public API of the inbox: handlers registered by decorator, or a call of `process` for every delivery."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from outrider.errors import Transient, UsageError
from outrider.event import Delivery, InboxStream
from outrider.inbox.model import Applied, Held, Ignored, InboxDeadLettered, LeftWithBroker
from outrider.inbox.router import Handler, Route, Router, Routes
from outrider.inbox.settings import ConsumerSettings, changed
from outrider.inbox.store import InboxStore
from outrider.inbox.transaction import BatchOutcome, HandlerFailed, InboxTransaction
from outrider.payload.payloads import Payloads
from outrider.wire import decode

DRAIN_MAX = 100


class Result(StrEnum):
    """The committed outcome of a delivery; the caller may ack."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    DROPPED = "dropped"
    WAITING = "waiting"
    DEAD_LETTERED = "dead_lettered"


_RESULTS = {
    Applied: Result.APPLIED,
    Ignored: Result.DROPPED,
    Held: Result.WAITING,
    InboxDeadLettered: Result.DEAD_LETTERED,
}


class Inbox(Router):
    """Handlers whose effects happen exactly once.

    Register handlers and run them with `outrider consume module:inbox`::

        inbox = Inbox()

        @inbox.handler("order.placed", consumer="billing")
        async def bill(event, conn):
            await conn.execute("INSERT INTO invoices (order_id) VALUES ($1)", event.aggregate_id)

    With `transactions`, a factory of SQLAlchemy's sessions for instance, handlers get a transaction of that kind::

        inbox = Inbox(transactions=async_sessionmaker(engine))

    With `payloads`, a handler gets every event decrypted, and in the current version of its type.

    Or keep your own loop, give the inbox a store, and call `process` for every delivery.
    """

    def __init__(
        self, store: InboxStore | None = None, *, transactions: Any = None, payloads: Payloads | None = None
    ) -> None:
        super().__init__(payloads)
        if store is not None and transactions is not None:
            raise UsageError(
                "an inbox with a store takes its transactions from there; open the store with transactions=…"
            )
        self.store, self.transactions = store, transactions

    def consumer(self, name: str, settings: ConsumerSettings | None = None, **options: Any) -> None:
        """Set the ordering, retries, batches and limits of a consumer.

        >>> Inbox().consumer("billing", ordering="strict", batch_max=100)
        """
        super().consumer(name, changed(settings or ConsumerSettings(), options))

    async def process(self, delivery: Delivery, handler: Handler, *, consumer: str) -> Result:
        """Handle one delivery in a transaction with its receipt; ack after the method returns.

        An error of the handler is raised here, after a rollback: do not ack, and deliver again. A malformed delivery
        goes to the dead letters of the consumer::

            result = await inbox.process(delivery, bill, consumer="billing")
        """
        store, routes = self._require_store(handler, consumer)
        received = decode(delivery)
        try:
            done = await InboxTransaction(store, routes).process([received])
            # The first delivery may have committed before its drain failed: the held events of a duplicate's stream may
            # still wait.
            for stream in [*done.draining, *(each.stream for each in done.duplicates)]:
                await _drain(store, routes, stream)
        except HandlerFailed as failed:
            raise failed.error from None
        return _result(done)

    async def drain(self, consumer: str, handler: Handler) -> int:
        """Handle held events that may continue after `outrider inbox replay`, `discard` or `skip-gap`; return how many.

        Call `drain` periodically beside `process`, with a handler for every type. An error of the handler is raised
        here, and the event stays held::

            handled = await inbox.drain("billing", bill)
        """
        store, routes = self._require_store(handler, consumer)
        handled, seen = 0, set[InboxStream]()
        try:
            while streams := await _find_draining(store, routes, seen):
                seen |= streams
                for stream in streams:
                    handled += await _drain(store, routes, stream)
        except HandlerFailed as failed:
            raise failed.error from None
        return handled

    def _require_store(self, handler: Handler, consumer: str) -> tuple[InboxStore, Routes]:
        if self.store is None:
            raise UsageError(
                "this inbox has no store; make it with Inbox(store), or run: outrider consume module:inbox"
            )
        settings = self.consumers[consumer].settings if consumer in self.consumers else ConsumerSettings()
        routes = Routes(consumer, settings, otherwise=Route(handler), payloads=self.payloads)
        routes.check(self.store)
        return self.store, routes


async def _drain(store: InboxStore, routes: Routes, stream: InboxStream) -> int:
    """Handle the held events of a stream; return the number of applied events."""
    handled, draining = 0, True
    while draining:
        done = await InboxTransaction(store, routes).process_held(stream, 1)
        handled += len(done.of(Applied))
        draining = bool(done.draining)
    return handled


async def _find_draining(store: InboxStore, routes: Routes, seen: set[InboxStream]) -> set[InboxStream]:
    """Find draining streams, except those in `seen`: another process has them, or they fill as fast as they drain."""
    found: set[InboxStream] = set()
    for cause in routes.settings.drains:
        found |= set(await store.draining(routes.consumer, DRAIN_MAX + len(seen), cause=cause))
    return found - seen


def _result(done: BatchOutcome) -> Result:
    if not done.entries:
        return Result.DUPLICATE
    outcome = done.entries[0].outcome
    if isinstance(outcome, LeftWithBroker):
        raise Transient("too many events of this stream wait already; do not ack, and deliver again later")
    return _RESULTS[type(outcome)]
