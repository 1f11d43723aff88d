"""Sagas that are started beside orders."""

from __future__ import annotations

from django.db import connection, transaction

from outrider.django.models import SagaInstance
from tests.django_project.shop.models import Order
from tests.django_project.shop.sagas import Placing, placing


def start() -> None:
    """A saga starts with its order."""
    with transaction.atomic():
        Order.objects.create(number="A-1")
        placing.start_sync(connection, Placing("A-1"), correlation_id="A-1", must_be_new=True)
    assert SagaInstance.objects.get(correlation_id="A-1").status == "started"


def ended() -> None:
    """It has come to its end."""
    saga = SagaInstance.objects.get(correlation_id="A-1")
    assert (saga.status, saga.state["number"]) == ("completed", "A-1!"), (saga.status, saga.last_error, saga.state)
