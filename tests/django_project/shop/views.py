"""Placing orders: by an ordinary view, by an asynchronous one, and by one that opens its transaction by hand."""

from __future__ import annotations

import sys

from asgiref.sync import sync_to_async
from django.db import transaction
from django.http import HttpRequest, HttpResponse

from outrider import Event
from outrider.django import astage, stage
from tests.django_project.shop.models import Order


def placed(number: str) -> Event:
    """Return the event of an order."""
    return Event("order.placed", {"number": number}, topic="orders", key=number, aggregate_id=number)


def place(request: HttpRequest) -> HttpResponse:
    """Place an order in the request's own transaction: ATOMIC_REQUESTS is on, or there is none."""
    number = request.POST["number"]
    Order.objects.create(number=number)
    stage(placed(number))
    if "fail" in request.POST:
        raise RuntimeError("the view failed after it had staged")
    return HttpResponse(number)


def _place_together(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        stage(placed(number))


async def place_async(request: HttpRequest) -> HttpResponse:
    """Place an order from a coroutine, all of it in one call."""
    await sync_to_async(_place_together)(request.POST["number"])
    return HttpResponse(request.POST["number"])


async def place_by_hand(request: HttpRequest) -> HttpResponse:
    """Place an order from a coroutine with the asynchronous ORM, in a block that is entered and left by hand."""
    number = request.POST["number"]
    block = transaction.atomic()
    await sync_to_async(block.__enter__)()
    try:
        await Order.objects.acreate(number=number)
        await astage(placed(number))
        if "fail" in request.POST:
            raise RuntimeError("the view failed after it had staged")
    finally:
        await sync_to_async(block.__exit__)(*sys.exc_info())
    return HttpResponse(number)
