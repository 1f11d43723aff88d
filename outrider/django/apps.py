"""The app, for INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import Tags, register

from outrider.django import checks


class OutriderConfig(AppConfig):
    """Outrider's tables, admin, checks and command, for a database of the project."""

    name = "outrider.django"
    label = "outrider"
    verbose_name = "Outrider"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks; checks that query a database run with `manage.py check --database default`."""
        register(checks.check_settings)
        register(checks.check_database)
        register(checks.check_installed, Tags.database)
