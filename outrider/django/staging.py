"""Staging inside `transaction.atomic()`, and waking the relays after the commit."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING
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

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def stage(*events: Event, using: str | None = None) -> list[UUID]:
    """Stage events inside `transaction.atomic()`; return their ids, in the order given.

    The events are part of the transaction: a commit stages them, and a rollback, also to an earlier savepoint, removes
    them. `using` is the alias of the database and of the surrounding `atomic` block; the default is
    OUTRIDER["DATABASE"]::

        with transaction.atomic():
            order.save()
            stage(Event("order.placed", {"id": order.pk}, aggregate_id=str(order.pk)))
    """
    connection = connections[using or conf.current().database]
    return _outbox(connection).stage_sync(connection, *events)


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


def _outbox(connection: BaseDatabaseWrapper) -> Outbox:
    chosen = conf.current()
    # Relays on SQLite notice a commit without a wake-up.
    if not chosen.wake or connection.vendor != "postgresql" or _testing():
        return _silent(chosen.schema)
    return _waking(store_url(connection.alias), chosen.schema)


def _testing() -> bool:
    """Return whether Django's tests are running.

    An open connection would prevent Django from dropping the test database.
    """
    # The attribute is the visible effect of `setup_test_environment`.
    return hasattr(mail, "outbox")


@cache
def _silent(schema: str) -> Outbox:
    return Outbox(schema=schema)


@cache
def _waking(url: str, schema: str) -> Outbox:
    return Outbox(schema=schema, wake=Waker(url, schema=schema))


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
