"""Sagas that are started beside orders."""

from __future__ import annotations

from django.db import connection, transaction

from outrider import Outbox
from outrider.django.models import Saga
from tests.django_project.shop.models import Order
from tests.django_project.shop.sagas import Placing, placing


def start() -> None:
    """A saga starts with its order."""
    with transaction.atomic():
        Order.objects.create(number="A-1")
        assert Outbox().start_saga_sync(connection, placing.new(Placing("A-1"), "A-1"))
    assert Saga.objects.get(correlation_id="A-1").status == "started"


def ended() -> None:
    """It has come to its end."""
    saga = Saga.objects.get(correlation_id="A-1")
    assert (saga.status, saga.state["number"]) == ("completed", "A-1!"), (saga.status, saga.last_error, saga.state)
