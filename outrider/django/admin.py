"""Outrider in the admin: events, dead letters and sagas to look at.

Nothing can be added, changed or deleted. What is in an event is shown to those who may `outrider.view_payload`; dead
letters are decided about by those who may `outrider.replay_dead_letter` or `outrider.discard_dead_letter`.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html

from outrider.django.deciding import Deciding
from outrider.django.fields import as_uuid
from outrider.django.filters import Bounded, among, recent
from outrider.django.models import ArchivedEvent, ConsumerDeadLetter, DeadLetter, Event, Saga
from outrider.lifecycle import STORED
from outrider.outcome import Policy, Reason
from outrider.saga_store import Status

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

PAYLOAD = "outrider.view_payload"


class ReadOnly(_ModelAdmin):
    """Lists and shows rows, and offers no way to change them."""

    hidden: ClassVar[tuple[str, ...]] = ("payload",)
    """Fields for those who may see payloads. They are read from the database for nobody else."""
    pretty: ClassVar[tuple[str, ...]] = ("headers", "payload", "failure")
    identifiers: ClassVar[tuple[str, ...]] = ("event_id",)
    keys: ClassVar[tuple[str, ...]] = ("key", "aggregate_id")
    paginator = Bounded
    show_full_result_count = False
    list_per_page = 50
    search_fields = ("pk",)
    search_help_text = "A whole event id, key or aggregate id."

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Let nobody."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Let nobody."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Let nobody."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Leave out what only the page of one row shows."""
        return super().get_queryset(request).defer(*self.hidden)

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Let nobody find out by filters in the address what they may not see; who may, has the page."""
        # Django 4.2 passes no request, and takes none.
        given = () if request is None else (request,)
        return lookup.partition("__")[0] not in self.hidden and super().lookup_allowed(lookup, value, *given)

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        """Find rows by a whole identifier or key, which indexes serve, and not by a part of one."""
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = Q(**dict.fromkeys(self.keys[:1], term))
        for key in self.keys[1:]:
            wanted |= Q(**{key: term})
        if (found := as_uuid(term)) is not None:
            for name in self.identifiers:
                wanted |= Q(**{name: found})
        return queryset.filter(wanted), False

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Name all columns, but for those that the user may not see."""
        names = [field.name for field in self.model._meta.fields]
        if not request.user.has_perm(PAYLOAD):  # type: ignore[union-attr]
            names = [name for name in names if name not in self.hidden]
        return [f"pretty_{name}" if name in self.pretty else name for name in names]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Let no field be written."""
        return self.get_fields(request, obj)

    @admin.display(description="headers")
    def pretty_headers(self, row: Any) -> str:
        """Show headers."""
        return _pretty(row.headers)

    @admin.display(description="payload")
    def pretty_payload(self, row: Any) -> str:
        """Show what is in an event."""
        return _pretty(row.payload)

    @admin.display(description="failure")
    def pretty_failure(self, row: Any) -> str:
        """Show why it failed."""
        return _pretty(row.failure)


@admin.register(Event)
class EventAdmin(ReadOnly):
    """What is not delivered yet."""

    list_display = ("event_id", "state", "event_type", "topic", "stream_key", "sequence", "attempts", "created_at")
    list_filter = (among("state", sorted(STORED)), recent("topic"), recent("event_type"))

    @admin.display(description="key")
    def stream_key(self, row: Any) -> str:
        """Show the key that orders it, which staging has left to the aggregate unless it was given."""
        return str(row.key or row.aggregate_id or row.event_id)


@admin.register(ArchivedEvent)
class ArchivedEventAdmin(ReadOnly):
    """What was delivered."""

    list_display = ("event_id", "event_type", "topic", "key", "sequence", "attempts", "sent_at")
    list_filter = (recent("topic"), recent("event_type"))


@admin.register(DeadLetter)
class DeadLetterAdmin(Deciding, ReadOnly):
    """What could not be delivered."""

    list_display = ("event_id", "reason", "policy", "event_type", "topic", "key", "attempts", "buried_at")
    list_filter = (among("reason", Reason), among("policy", Policy), recent("topic"), recent("event_type"))


@admin.register(ConsumerDeadLetter)
class ConsumerDeadLetterAdmin(Deciding, ReadOnly):
    """What consumers could not handle."""

    consumers = True
    hidden = ("headers", "body")
    pretty = ("headers", "body", "failure")
    keys = ("key",)
    search_help_text = "A whole event id or key."
    list_display = ("id", "consumer", "event_id", "reason", "policy", "event_type", "topic", "key", "buried_at")
    list_filter = (
        *(recent("consumer"), among("reason", Reason), among("policy", Policy)),
        *(recent("topic"), recent("event_type")),
    )

    @admin.display(description="headers")
    def pretty_headers(self, row: Any) -> str:
        """Show headers, which are kept as bytes."""
        return _pretty({name: _text(base64.b64decode(value)) for name, value in row.headers.items()})

    @admin.display(description="body")
    def pretty_body(self, row: Any) -> str:
        """Show what came, whatever it is."""
        return _pretty(_text(bytes(row.body)))


@admin.register(Saga)
class SagaAdmin(ReadOnly):
    """Sagas, under way and ended."""

    hidden = ("state",)
    pretty = ("state",)
    identifiers = ("saga_id",)
    keys = ("correlation_id",)
    search_help_text = "A whole saga id or correlation id."
    list_display = ("saga_id", "saga_type", "correlation_id", "status", "current_step", "needs_attention", "updated_at")
    list_filter = (among("status", Status), "needs_attention", recent("saga_type"))

    @admin.display(description="state")
    def pretty_state(self, row: Any) -> str:
        """Show what the saga knows."""
        return _pretty(row.state)


def _pretty(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    return format_html("<pre>{}</pre>", text)


def _text(raw: bytes) -> Any:
    """Read bytes: as JSON, as text, or as base64, whichever they are first."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(raw).decode()}"
    try:
        return json.loads(text)
    except ValueError:
        return text
