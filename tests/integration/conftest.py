"""Fixtures of the integration tests."""

from tests.integration.django_fixtures import bare_project, migrated_postgres, migrated_sqlite, project

__all__ = ["bare_project", "migrated_postgres", "migrated_sqlite", "project"]
