"""Columns as the stores write them, read by Django: identifiers, times and JSON differ between the two engines."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.db import models
from django.utils import timezone

if TYPE_CHECKING:
    _UUIDField = models.UUIDField[Any, Any]
    _DateTimeField = models.DateTimeField[Any, Any]
    _TextField = models.TextField[Any, Any]
else:
    _UUIDField, _DateTimeField, _TextField = models.UUIDField, models.DateTimeField, models.TextField


class Identifier(_UUIDField):
    """A UUID. In SQLite it is text with hyphens, where Django would write it without."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Write it as the store does."""
        found = self.to_python(value)
        return found if found is None or connection.features.has_native_uuid_field else str(found)


class Moment(_DateTimeField):
    """A time. In SQLite it is the number of seconds since 1970, where Django would expect text."""

    def get_internal_type(self) -> str:
        """Be no DateTimeField to the engine, which would convert what comes."""
        return "OutriderMoment"

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Read seconds; PostgreSQL's driver brings times."""
        if not isinstance(value, float | int):
            return value
        moment = datetime.fromtimestamp(value, UTC)
        return moment if settings.USE_TZ else timezone.make_naive(moment)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Write seconds where the store does."""
        found = self.get_prep_value(value)
        if isinstance(found, datetime) and connection.vendor == "sqlite":
            return (found if timezone.is_aware(found) else timezone.make_aware(found)).timestamp()
        return found


class Json(_TextField):
    """JSON. PostgreSQL's driver brings it parsed, SQLite as text."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Parse what is text."""
        return json.loads(value) if isinstance(value, str) else value


def as_uuid(text: str) -> UUID | None:
    """Read an identifier that a person typed; None if it is none.

    ```python
    as_uuid("0190b3a6-7c1e-7b32-9d7e-2f1a5c3b4d5e")
    ```
    """
    try:
        return UUID(text.strip())
    except ValueError:
        return None
