"""Placing orders through views."""

from __future__ import annotations

import asyncio

from django.test import AsyncClient, Client

from outrider.django.models import OutboxEvent
from tests.django_project.shop.models import Order


def atomic_requests() -> None:
    """With ATOMIC_REQUESTS an ordinary view stages in the request's transaction."""
    client = Client(raise_request_exception=False)
    assert client.post("/orders/", {"number": "A-1"}).status_code == 200
    assert client.post("/orders/", {"number": "A-2", "fail": "yes"}).status_code == 500
    assert [order.number for order in Order.objects.all()] == ["A-1"]
    assert [event.key for event in OutboxEvent.objects.all()] == ["A-1"]


def asynchronous() -> None:
    """An asynchronous view stages in a function of its own, or in a block that it enters and leaves by hand."""

    async def visit() -> None:
        client = AsyncClient(raise_request_exception=False)
        assert (await client.post("/orders/async/", {"number": "A-1"})).status_code == 200
        assert (await client.post("/orders/by-hand/", {"number": "A-2"})).status_code == 200
        assert (await client.post("/orders/by-hand/", {"number": "A-3", "fail": "yes"})).status_code == 500

    asyncio.run(visit())
    assert sorted(order.number for order in Order.objects.all()) == ["A-1", "A-2"]
    assert sorted(str(event.key) for event in OutboxEvent.objects.all()) == ["A-1", "A-2"]
