"""Filters and pages of the admin that stay quick however many rows there are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.paginator import Paginator

if TYPE_CHECKING:
    _Paginator = Paginator[Any]
else:
    _Paginator = Paginator

LOOKED_AT = 1000
"""Rows that are looked at for the values to offer."""
COUNTED = 10_000
"""Rows that are counted; beyond, the filters and the search lead further."""


class Bounded(_Paginator):
    """Counts no further than somebody would leaf."""

    @cached_property
    def count(self) -> int:
        """Return the number of rows, or the bound."""
        rows: Any = self.object_list
        return int(rows.order_by()[:COUNTED].count())


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
    """Return a filter that offers the values of the first rows listed: to look at all could take minutes.

    ```python
    list_filter = (recent("topic"),)
    ```
    """

    class Recent(admin.SimpleListFilter):
        title = field.replace("_", " ")
        parameter_name = field

        def lookups(self, request: Any, model_admin: Any) -> list[tuple[Any, str]]:
            rows = model_admin.get_queryset(request).values_list(field, flat=True)[:LOOKED_AT]
            # One that is chosen stays on offer, though no row may have it any more.
            found = {*rows, self.used_parameters.get(field)} - {None}
            return [(value, str(value)) for value in sorted(found)]

        def queryset(self, request: Any, queryset: Any) -> Any:
            return queryset.filter(**{field: self.value()}) if self.value() is not None else queryset

        def has_output(self) -> bool:
            return bool(self.lookup_choices)

    return Recent
