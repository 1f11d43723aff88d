"""Staging inside `transaction.atomic()`, and waking the relays once it has committed."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core import mail
from django.db import connections

from outrider.django import conf
from outrider.django.place import store_url
from outrider.event import Event
from outrider.staging import Outbox
from outrider.waker import Waker

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def stage(*events: Event, using: str | None = None) -> list[UUID]:
    """Stage events inside `transaction.atomic()`; return their ids, in the order given.

    They share the fate of the block: commit, and they will be delivered; roll back, or roll back to a savepoint before
    them, and they never existed. `using` is the alias of the database, and of the `atomic` block around; unless given,
    OUTRIDER["DATABASE"]::

        with transaction.atomic():
            order.save()
            stage(Event("order.placed", {"id": order.pk}, aggregate_id=str(order.pk)))
    """
    connection = connections[using or conf.current().database]
    return _outbox(connection).stage_sync(connection, *events)


async def astage(*events: Event, using: str | None = None) -> list[UUID]:
    """Stage events from a coroutine, on the thread and connection that Django's asynchronous ORM uses.

    Django has no asynchronous `atomic`, so the usual way is a function that does all of it, called by `sync_to_async`;
    there, use `stage`. This one is for a block that is entered and left by hand::

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
    # SQLite's relays see a commit by themselves.
    if not chosen.wake or connection.vendor != "postgresql" or _testing():
        return _silent(chosen.schema)
    return _waking(store_url(connection.alias), chosen.schema)


def _testing() -> bool:
    """Tell whether Django's tests are running: a connection of ours would keep their database from being dropped."""
    # What `setup_test_environment` does that others can see.
    return hasattr(mail, "outbox")


@cache
def _silent(schema: str) -> Outbox:
    return Outbox(schema=schema)


@cache
def _waking(url: str, schema: str) -> Outbox:
    return Outbox(schema=schema, wake=Waker(url, schema=schema))
