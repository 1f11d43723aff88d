"""The project's pages."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from tests.django_project.shop import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders/", views.place),
    path("orders/async/", views.place_async),
    path("orders/by-hand/", views.place_by_hand),
]
