"""Handlers and local steps in Django's own transactions."""

from __future__ import annotations

from outrider.django import conf
from outrider.drivers.lending.django import DjangoTransactions


def transactions(using: str | None = None) -> DjangoTransactions:
    """Let handlers of an inbox, or the local steps of sagas, run inside `transaction.atomic()`.

    They are plain functions, and run on threads. `using` is the alias of the database; unless given,
    OUTRIDER["DATABASE"]::

        inbox = Inbox(transactions=outrider.django.transactions())

        @inbox.handler("order.placed", consumer="billing")
        def bill(event, connection):
            Invoice.objects.create(order_id=event.aggregate_id)
    """
    return DjangoTransactions(using or conf.current().database)
