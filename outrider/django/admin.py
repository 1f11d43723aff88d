"""Outrider in the Django admin: read-only lists of events, dead letters and sagas.

Rows cannot be added, changed or deleted. The permission `outrider.view_payload` shows the content of events; the
permissions `outrider.replay_dead_letter` and `outrider.discard_dead_letter` allow decisions on dead letters.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html

from outrider.app import open_inbox, open_store
from outrider.background import shared
from outrider.config import redacted
from outrider.django import conf
from outrider.django.conf import store_url
from outrider.django.models import ArchivedEvent, ConsumerDeadLetter, DeadLetter, OutboxEvent, SagaInstance, as_uuid
from outrider.errors import OutriderError
from outrider.event import DeadLetterReason, OnDeadLetter
from outrider.outbox.model import STORED
from outrider.saga.model import Status

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
    _AdminMixin = admin.ModelAdmin[Any]
else:
    _ModelAdmin, _AdminMixin = admin.ModelAdmin, object

PAYLOAD = "outrider.view_payload"

MOST = 500
"""The limit of dead letters per action; the command line allows more."""

DONE = {"replay": "sent again", "discard": "discarded"}

if TYPE_CHECKING:
    _Paginator = Paginator[Any]
else:
    _Paginator = Paginator

LOOKED_AT = 1000
"""The number of rows read to find filter values."""

COUNTED = 10_000
"""The limit of counted rows; filters and search find rows beyond the limit."""


class Bounded(_Paginator):
    """A paginator with an upper limit of counted rows."""

    @cached_property
    def count(self) -> int:
        """Return the number of rows, at most the limit."""
        rows: Any = self.object_list
        return int(rows.order_by()[:COUNTED].count())


class ReadOnly(_ModelAdmin):
    """Lists and shows rows, without any way to change them."""

    hidden: ClassVar[tuple[str, ...]] = ("payload",)
    """Fields for users with the permission to see payloads.

    For other users the fields are not read from the database.
    """
    pretty: ClassVar[tuple[str, ...]] = ("headers", "payload", "failure")
    identifiers: ClassVar[tuple[str, ...]] = ("event_id",)
    keys: ClassVar[tuple[str, ...]] = ("key", "aggregate_id")
    paginator = Bounded
    show_full_result_count = False
    list_per_page = 50
    search_fields = ("pk",)
    search_help_text = "A whole event id, key or aggregate id."

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: rows are read-only."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: rows are read-only."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: rows are read-only."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Defer the columns that only the page of a single row shows."""
        return super().get_queryset(request).defer(*self.hidden)

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Reject filters in the URL on hidden columns, which would reveal payloads to users without the permission."""
        # Django 4.2 has no `request` parameter.
        given = () if request is None else (request,)
        return lookup.partition("__")[0] not in self.hidden and super().lookup_allowed(lookup, value, *given)

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        """Find rows by a whole identifier or key, which has an index; partial matches are not supported."""
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
        """Return all columns except those hidden from the user."""
        names = [field.name for field in self.model._meta.fields]
        if not request.user.has_perm(PAYLOAD):  # type: ignore[union-attr]
            names = [name for name in names if name not in self.hidden]
        return [f"pretty_{name}" if name in self.pretty else name for name in names]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return all fields: none can be edited."""
        return self.get_fields(request, obj)

    @admin.display(description="headers")
    def pretty_headers(self, row: Any) -> str:
        """Show the headers."""
        return _pretty(row.headers)

    @admin.display(description="payload")
    def pretty_payload(self, row: Any) -> str:
        """Show the payload of an event."""
        return _pretty(row.payload)

    @admin.display(description="failure")
    def pretty_failure(self, row: Any) -> str:
        """Show the reason of the failure."""
        return _pretty(row.failure)


def among(field: str, values: Iterable[str]) -> type[admin.SimpleListFilter]:
    """Return a filter that offers fixed values.

    ```python
    list_filter = (among("state", ("pending", "parked")),)
    ```
    """
    offered = [(str(value), str(value).replace("_", " ")) for value in values]

    class Among(admin.SimpleListFilter):
        title = field.replace("_", " ")
        parameter_name = field

        def lookups(self, request: Any, model_admin: Any) -> list[tuple[Any, str]]:
            return list(offered)

        def queryset(self, request: Any, queryset: Any) -> Any:
            return queryset.filter(**{field: self.value()}) if self.value() is not None else queryset

    return Among


def recent(field: str) -> type[admin.SimpleListFilter]:
    """Return a filter that offers the values of the first rows listed. Reading all rows could take minutes.

    ```python
    list_filter = (recent("topic"),)
    ```
    """

    class Recent(admin.SimpleListFilter):
        title = field.replace("_", " ")
        parameter_name = field

        def lookups(self, request: Any, model_admin: Any) -> list[tuple[Any, str]]:
            rows = model_admin.get_queryset(request).values_list(field, flat=True)[:LOOKED_AT]
            # A selected value stays on offer even if no listed row has it.
            found = {*rows, self.used_parameters.get(field)} - {None}
            return [(value, str(value)) for value in sorted(found)]

        def queryset(self, request: Any, queryset: Any) -> Any:
            return queryset.filter(**{field: self.value()}) if self.value() is not None else queryset

        def has_output(self) -> bool:
            return bool(self.lookup_choices)

    return Recent


@admin.register(OutboxEvent)
class EventAdmin(ReadOnly):
    """Events that are not published yet."""

    list_display = ("event_id", "state", "event_type", "topic", "stream_key", "sequence", "attempts", "created_at")
    list_filter = (among("state", sorted(STORED)), recent("topic"), recent("event_type"))

    @admin.display(description="key")
    def stream_key(self, row: Any) -> str:
        """Show the ordering key; by default staging uses the aggregate."""
        return str(row.key or row.aggregate_id or row.event_id)


@admin.register(ArchivedEvent)
class ArchivedEventAdmin(ReadOnly):
    """Events that were published."""

    list_display = ("event_id", "event_type", "topic", "key", "sequence", "attempts", "sent_at")
    list_filter = (recent("topic"), recent("event_type"))


class Deciding(_AdminMixin):
    """The actions replay and discard, each with a separate permission."""

    consumers: ClassVar[bool] = False
    actions = ("replay", "discard")

    def has_replay_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may replay dead letters."""
        return request.user.has_perm("outrider.replay_dead_letter")  # type: ignore[union-attr]

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may discard dead letters."""
        return request.user.has_perm("outrider.discard_dead_letter")  # type: ignore[union-attr]

    @transaction.non_atomic_requests(using=conf.while_loading().database)
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Run without a transaction of the request. In SQLite the store and the request would wait for each other."""
        return super().changelist_view(request, extra_context)

    @admin.action(description="Send the selected dead letters again", permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Replay dead letters."""
        self._decide(request, queryset, "replay")

    @admin.action(description="Discard the selected dead letters", permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask for confirmation; after the confirmation, discard dead letters."""
        if request.POST.get("sure"):
            self._decide(request, queryset, "discard")
            return None
        if self._too_many(request, queryset):
            return None
        context = {
            **self.admin_site.each_context(request),
            "title": "Are you sure?",
            "rows": list(queryset),
            "opts": self.opts,
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return TemplateResponse(request, "admin/outrider/discard.html", context)

    def _decide(self, request: HttpRequest, queryset: QuerySet[Any], verb: str) -> None:
        if self._too_many(request, queryset):
            return
        ids = list(queryset.values_list("pk", flat=True))
        try:
            count = decide(verb, ids, f"django:{request.user}", consumers=self.consumers)
        except OutriderError as error:
            self.message_user(request, redacted(str(error)), messages.ERROR)
            return
        text = f"{count} dead letter{'' if count == 1 else 's'} {DONE[verb]}."
        self.message_user(request, text, messages.SUCCESS if count == len(ids) else messages.WARNING)

    def _too_many(self, request: HttpRequest, queryset: QuerySet[Any]) -> bool:
        if queryset.count() <= MOST:
            return False
        command = "inbox" if self.consumers else "dead-letters"
        text = f"At most {MOST} at once; for more, use filters with: manage.py outrider {command} replay (or discard)"
        self.message_user(request, text, messages.ERROR)
        return True


@admin.register(DeadLetter)
class DeadLetterAdmin(Deciding, ReadOnly):
    """Dead letters of the outbox."""

    list_display = ("event_id", "reason", "policy", "event_type", "topic", "key", "attempts", "dead_lettered_at")
    list_filter = (
        among("reason", DeadLetterReason),
        among("policy", OnDeadLetter),
        recent("topic"),
        recent("event_type"),
    )


@admin.register(ConsumerDeadLetter)
class ConsumerDeadLetterAdmin(Deciding, ReadOnly):
    """Dead letters of consumers."""

    consumers = True
    hidden = ("headers", "body")
    pretty = ("headers", "body", "failure")
    keys = ("key",)
    search_help_text = "A whole event id or key."
    list_display = ("id", "consumer", "event_id", "reason", "policy", "event_type", "topic", "key", "dead_lettered_at")
    list_filter = (
        *(recent("consumer"), among("reason", DeadLetterReason), among("policy", OnDeadLetter)),
        *(recent("topic"), recent("event_type")),
    )

    @admin.display(description="headers")
    def pretty_headers(self, row: Any) -> str:
        """Show the headers, which are stored as bytes."""
        return _pretty({name: _text(base64.b64decode(value)) for name, value in row.headers.items()})

    @admin.display(description="body")
    def pretty_body(self, row: Any) -> str:
        """Show the body of the delivery in any format."""
        return _pretty(_text(bytes(row.body)))


@admin.register(SagaInstance)
class SagaInstanceAdmin(ReadOnly):
    """Sagas, running and ended."""

    hidden = ("state",)
    pretty = ("state",)
    identifiers = ("saga_id",)
    keys = ("correlation_id",)
    search_help_text = "A whole saga id or correlation id."
    list_display = ("saga_id", "saga_type", "correlation_id", "status", "current_step", "needs_attention", "updated_at")
    list_filter = (among("status", Status), "needs_attention", recent("saga_type"))

    @admin.display(description="state")
    def pretty_state(self, row: Any) -> str:
        """Show the state of the saga."""
        return _pretty(row.state)


def _pretty(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    return format_html("<pre>{}</pre>", text)


def _text(raw: bytes) -> Any:
    """Decode bytes: as JSON if possible, otherwise as text, otherwise as base64."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(raw).decode()}"
    try:
        return json.loads(text)
    except ValueError:
        return text


def decide(verb: str, ids: Sequence[Any], actor: str, *, consumers: bool = False) -> int:
    """Replay or discard dead letters, of the outbox or of consumers; return how many.

    ```python
    decide("replay", [event_id], "django:ann")
    ```
    """
    chosen = conf.current()
    opening = open_inbox if consumers else open_store
    return (
        shared()
        .run(_decide(opening(store_url(chosen.database), schema=chosen.schema), verb, ids, actor, consumers))
        .result()
    )


async def _decide(opening: Any, verb: str, ids: Sequence[Any], actor: str, consumers: bool) -> int:
    store = await opening
    try:
        count: int = await getattr(store.admin, verb)(ids, actor)
        if not consumers:
            await store.notify()
        return count
    finally:
        await store.close()
