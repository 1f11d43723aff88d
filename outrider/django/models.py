"""Outrider's tables as models, to look at: the migrations make them, the stores write them, and nobody else does."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from django.db import models

from outrider.django import conf
from outrider.django.conf import table
from outrider.django.fields import Identifier, Json, Moment
from outrider.errors import Misuse

READ_ONLY = "Outrider's tables are written by Outrider alone; to publish something, use outrider.django.stage"


class Rows(models.Manager[Any]):
    """Reads from the database that OUTRIDER["DATABASE"] names, whatever the project's routers say."""

    def get_queryset(self) -> models.QuerySet[Any]:
        """Return all rows."""
        return super().get_queryset().using(conf.current().database)


class Row(models.Model):
    """A row that may be read only."""

    objects: ClassVar[models.Manager[Any]] = Rows()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise Misuse(READ_ONLY)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise Misuse(READ_ONLY)


class Staged(Row):
    """What every event has, wherever it is."""

    event_id = Identifier(primary_key=True)
    position: models.BigIntegerField[int, int] = models.BigIntegerField(db_column="id")
    event_type: models.TextField[str, str] = models.TextField()
    aggregate_type: models.TextField[str | None, str | None] = models.TextField(null=True)
    aggregate_id: models.TextField[str | None, str | None] = models.TextField(null=True)
    topic: models.TextField[str | None, str | None] = models.TextField(null=True)
    key: models.TextField[str | None, str | None] = models.TextField(null=True)
    routing_key: models.TextField[str | None, str | None] = models.TextField(null=True)
    priority: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    sequence: models.BigIntegerField[int | None, int | None] = models.BigIntegerField(null=True)
    schema_version: models.IntegerField[int, int] = models.IntegerField()
    saga_id: models.TextField[str | None, str | None] = models.TextField(null=True)
    attempts: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    created_at = Moment()
    headers = Json()
    payload = Json()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id}"


class Event(Staged):
    """An event that no broker has yet."""

    state: models.TextField[str, str] = models.TextField()
    available_at = Moment(null=True)
    lane: models.SmallIntegerField[int | None, int | None] = models.SmallIntegerField(null=True)
    failure = Json(null=True)

    class Meta:
        managed = False
        db_table = table("outbox")
        ordering = ("position",)
        verbose_name = "undelivered event"
        default_permissions = ("view",)
        permissions = (("view_payload", "Can see what is in events and sagas"),)


class ArchivedEvent(Staged):
    """An event that was delivered, kept for a while."""

    sent_at = Moment()

    class Meta:
        managed = False
        db_table = table("outbox_archive")
        ordering = ("-sent_at",)
        verbose_name = "delivered event"
        default_permissions = ("view",)


class DeadLetter(Staged):
    """An event that could not be delivered, and waits for a person to decide."""

    reason: models.TextField[str, str] = models.TextField()
    policy: models.TextField[str, str] = models.TextField()
    buried_at = Moment()
    lane: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    failure = Json(null=True)

    class Meta:
        managed = False
        db_table = table("outbox_dead_letter")
        ordering = ("position",)
        default_permissions = ("view",)
        permissions = (
            ("replay_dead_letter", "Can send dead letters again"),
            ("discard_dead_letter", "Can give dead letters up"),
        )


class ConsumerDeadLetter(Row):
    """An event that a consumer could not handle, and that waits for a person to decide."""

    id: models.BigIntegerField[int, int] = models.BigIntegerField(primary_key=True)
    consumer: models.TextField[str, str] = models.TextField()
    event_id = Identifier()
    event_type: models.TextField[str, str] = models.TextField()
    topic: models.TextField[str, str] = models.TextField()
    key: models.TextField[str, str] = models.TextField()
    sequence: models.BigIntegerField[int | None, int | None] = models.BigIntegerField(null=True)
    reason: models.TextField[str, str] = models.TextField()
    policy: models.TextField[str, str] = models.TextField()
    attempts: models.IntegerField[int, int] = models.IntegerField()
    received_at = Moment()
    buried_at = Moment()
    failure = Json()
    headers = Json()
    body: models.BinaryField[bytes, bytes] = models.BinaryField()

    class Meta:
        managed = False
        db_table = table("inbox_dead_letter")
        ordering = ("id",)
        verbose_name = "dead letter of a consumer"
        verbose_name_plural = "dead letters of consumers"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.consumer}: {self.event_type} {self.event_id}"


class Saga(Row):
    """A saga, under way or ended."""

    saga_id = Identifier(primary_key=True)
    saga_type: models.TextField[str, str] = models.TextField()
    definition_version: models.IntegerField[int, int] = models.IntegerField()
    correlation_id: models.TextField[str, str] = models.TextField()
    status: models.TextField[str, str] = models.TextField()
    current_step: models.TextField[str | None, str | None] = models.TextField(null=True)
    needs_attention: models.BooleanField[bool, bool] = models.BooleanField()
    last_error: models.TextField[str | None, str | None] = models.TextField(null=True)
    retry_count: models.IntegerField[int, int] = models.IntegerField()
    started_at = Moment()
    updated_at = Moment()
    ended_at = Moment(null=True)
    wake_at = Moment(null=True)
    state = Json()

    class Meta:
        managed = False
        db_table = table("saga_instance")
        ordering = ("-updated_at",)
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.saga_type} {self.correlation_id}"
