"""Actions on dead letters in the admin: replay, and discard after a question. Who did it is recorded by the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from outrider.config import redacted
from outrider.django import conf
from outrider.django.desk import decide
from outrider.errors import OutriderError

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = object

MOST = 500
"""Dead letters that are decided about at once; the command line takes more."""
DONE = {"replay": "sent again", "discard": "discarded"}


class Deciding(_ModelAdmin):
    """The two actions, each for those who have its permission."""

    consumers: ClassVar[bool] = False
    actions = ("replay", "discard")

    def has_replay_permission(self, request: HttpRequest) -> bool:
        """Tell whether the user may send dead letters again."""
        return request.user.has_perm("outrider.replay_dead_letter")  # type: ignore[union-attr]

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Tell whether the user may give dead letters up."""
        return request.user.has_perm("outrider.discard_dead_letter")  # type: ignore[union-attr]

    @transaction.non_atomic_requests(using=conf.while_loading().database)
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Run without a transaction of the request's: in SQLite, ours would wait for its end, and it for ours."""
        return super().changelist_view(request, extra_context)

    @admin.action(description="Send the selected dead letters again", permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Send dead letters again."""
        self._decide(request, queryset, "replay")

    @admin.action(description="Discard the selected dead letters", permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask first; with the answer, give dead letters up."""
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
        command = "inbox" if self.consumers else "dead"
        text = f"At most {MOST} at once; for more, use filters with: manage.py outrider {command} replay (or discard)"
        self.message_user(request, text, messages.ERROR)
        return True
