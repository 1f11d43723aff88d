"""Outrider's tables as read-only models. The migrations create the tables, and only the stores write to them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from uuid import UUID

from django.conf import settings
from django.db import models
from django.utils import timezone

from outrider.django import conf
from outrider.django.conf import table
from outrider.errors import UsageError

READ_ONLY = "Outrider's tables are written by Outrider alone; to publish something, use outrider.django.stage"

if TYPE_CHECKING:
    _UUIDField = models.UUIDField[Any, Any]
    _DateTimeField = models.DateTimeField[Any, Any]
    _TextField = models.TextField[Any, Any]
else:
    _UUIDField, _DateTimeField, _TextField = models.UUIDField, models.DateTimeField, models.TextField


class Rows(models.Manager[Any]):
    """Reads from the database that OUTRIDER["DATABASE"] names; the routers of the project are ignored."""

    def get_queryset(self) -> models.QuerySet[Any]:
        """Return all rows."""
        return super().get_queryset().using(conf.current().database)


class Row(models.Model):
    """A read-only row."""

    objects: ClassVar[models.Manager[Any]] = Rows()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: rows are read-only."""
        raise UsageError(READ_ONLY)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: rows are read-only."""
        raise UsageError(READ_ONLY)


class Identifier(_UUIDField):
    """A UUID. SQLite stores text with hyphens; Django's own field would write no hyphens."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Convert the value to the format of the store."""
        found = self.to_python(value)
        return found if found is None or connection.features.has_native_uuid_field else str(found)


class Json(_TextField):
    """A JSON value. The driver of PostgreSQL returns parsed values, SQLite returns text."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Parse text."""
        return json.loads(value) if isinstance(value, str) else value


class Moment(_DateTimeField):
    """A time. SQLite stores seconds since 1970; Django's own field would expect text."""

    def get_internal_type(self) -> str:
        """Return a type other than DateTimeField, for which the database engine would convert values."""
        return "OutriderMoment"

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Convert seconds to a time; the driver of PostgreSQL already returns times."""
        if not isinstance(value, float | int):
            return value
        moment = datetime.fromtimestamp(value, UTC)
        return moment if settings.USE_TZ else timezone.make_naive(moment)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Convert the time to seconds for SQLite."""
        found = self.get_prep_value(value)
        if isinstance(found, datetime) and connection.vendor == "sqlite":
            return (found if timezone.is_aware(found) else timezone.make_aware(found)).timestamp()
        return found


class Staged(Row):
    """The common columns of events in all tables."""

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
    schema_version: models.TextField[str, str] = models.TextField()
    saga_id: models.TextField[str | None, str | None] = models.TextField(null=True)
    attempts: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    created_at = Moment()
    headers = Json()
    payload = Json()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id}"


class OutboxEvent(Staged):
    """An event that no broker has confirmed yet."""

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
    """A published event, kept until its retention ends."""

    sent_at = Moment()

    class Meta:
        managed = False
        db_table = table("outbox_archive")
        ordering = ("-sent_at",)
        verbose_name = "delivered event"
        default_permissions = ("view",)


class DeadLetter(Staged):
    """An event that could not be published, and waits for an operator."""

    reason: models.TextField[str, str] = models.TextField()
    policy: models.TextField[str, str] = models.TextField()
    dead_lettered_at = Moment()
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
    """An event that a consumer could not handle, and waits for an operator."""

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
    dead_lettered_at = Moment()
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


class SagaInstance(Row):
    """A saga, running or ended."""

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


def as_uuid(text: str) -> UUID | None:
    """Parse an identifier typed by a user; return None if the text is not a UUID.

    ```python
    as_uuid("0190b3a6-7c1e-7b32-9d7e-2f1a5c3b4d5e")
    ```
    """
    try:
        return UUID(text.strip())
    except ValueError:
        return None
