"""Outrider as a Django app: migrations, staging, a read-only admin, system checks and `manage.py outrider`.

Add "outrider.django" to INSTALLED_APPS, run `manage.py migrate`, and stage events beside the rows of the application::

    from django.db import transaction
    from outrider import Event
    from outrider.django import stage

    with transaction.atomic():
        order.save()
        stage(Event("order.placed", {"id": order.pk}, aggregate_id=str(order.pk)))
"""

from outrider.django.staging import astage, outbox, stage, transactions

__all__ = ["astage", "outbox", "stage", "transactions"]
