"""Staging inside `transaction.atomic()`, and waking the relays after the commit."""

from __future__ import annotations

from functools import cache
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core import mail
from django.db import connections

from outrider.django import conf
from outrider.django.conf import store_url
from outrider.drivers.django import DjangoTransactions
from outrider.event import Event
from outrider.outbox.staging import Outbox
from outrider.waker import Waker


def stage(*events: Event, using: str | None = None) -> list[UUID]:
    """Stage events inside `transaction.atomic()`; return their ids, in the order given.

    The events are part of the transaction: a commit stages them, and a rollback, also to an earlier savepoint, removes
    them. `using` is the alias of the database and of the surrounding `atomic` block; the default is
    OUTRIDER["DATABASE"]::

        with transaction.atomic():
            order.save()
            stage(Event("order.placed", {"id": order.pk}, aggregate_id=str(order.pk)))
    """
    return outbox(using).stage_sync(connections[using or conf.current().database], *events)


async def astage(*events: Event, using: str | None = None) -> list[UUID]:
    """Stage events from a coroutine, on the thread and connection that Django's asynchronous ORM uses.

    Django has no asynchronous `atomic`. Usually a synchronous function does all the work and is called with
    `sync_to_async`; use `stage` there. Use `astage` in a block that is entered and left by hand::

        block = transaction.atomic()
        await sync_to_async(block.__enter__)()
        try:
            order = await Order.objects.acreate(number="A-7")
            await astage(Event("order.placed", {"id": order.pk}))
        finally:
            await sync_to_async(block.__exit__)(*sys.exc_info())

    Under ASGI each request has a thread of its own for this. Elsewhere all tasks of an event loop share one, and with
    it the connection: let no other task use the database while such a block is open.
    """
    return await sync_to_async(stage, thread_sensitive=True)(*events, using=using)


def outbox(using: str | None = None) -> Outbox:
    """Return the outbox of OUTRIDER, with its schema and its payloads, for a participant or the start of a saga::

    with transaction.atomic():
        order_saga.start_sync(connection, Order("A-7"), correlation_id="A-7", outbox=outrider.django.outbox())
    """
    chosen = conf.current()
    connection = connections[using or chosen.database]
    # Relays on SQLite notice a commit without a wake-up.
    wakes = chosen.wake and connection.vendor == "postgresql" and not _testing()
    return _outbox(store_url(connection.alias) if wakes else None, chosen.schema, chosen.payloads)


def _testing() -> bool:
    """Return whether Django's tests are running.

    An open connection would prevent Django from dropping the test database.
    """
    # The attribute is the visible effect of `setup_test_environment`.
    return hasattr(mail, "outbox")


@cache
def _outbox(woken_url: str | None, schema: str, payloads: str | None) -> Outbox:
    wake = None if woken_url is None else Waker(woken_url, schema=schema)
    return Outbox(schema=schema, wake=wake, payloads=conf.payloads_of(payloads) if payloads else None)


def transactions(using: str | None = None) -> DjangoTransactions:
    """Run the handlers of an inbox, or the local steps of sagas, inside `transaction.atomic()`.

    Handlers and steps are plain functions, and run on threads. `using` is the alias of the database; the default is
    OUTRIDER["DATABASE"]::

        inbox = Inbox(transactions=outrider.django.transactions())

        @inbox.handler("order.placed", consumer="billing")
        def bill(event, connection):
            Invoice.objects.create(order_id=event.aggregate_id)
    """
    return DjangoTransactions(using or conf.current().database)
