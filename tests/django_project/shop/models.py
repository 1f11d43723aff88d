"""The tables of the shop."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order."""

    number: models.TextField[str, str] = models.TextField(unique=True)

    def __str__(self) -> str:
        return str(self.number)
