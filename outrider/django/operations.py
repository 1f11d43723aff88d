"""The one operation of our migrations: it runs the steps that `outrider db migrate` runs, and records them alike.

Whichever comes first installs; the other finds the record, checks that the texts are the same, and passes over.
"""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation

from outrider.django import conf
from outrider.django.recipe import VENDORS, perform, recipe_for


class Install(Operation):
    """Bring Outrider's tables up to a version, in the database that OUTRIDER["DATABASE"] names and in no other.

    Going back drops them, with archive, receipts and journals; it is refused while an event is not delivered, a dead
    letter is not decided about, or a saga is under way.
    """

    def __init__(self, version: int) -> None:
        self.version = version

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Tell Django how to write this down."""
        return type(self).__qualname__, [self.version], {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing in the state: the models are not managed."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run what is pending; for `sqlmigrate`, write everything."""
        if _concerned(app_label, schema_editor):
            recipe, lanes = recipe_for(schema_editor.connection), conf.current().lanes
            if schema_editor.collect_sql:
                _collect(schema_editor, recipe.written(self.version, lanes, after=self.version - 1))
            else:
                perform(schema_editor.connection, recipe.install(self.version, lanes))

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Take this version back, and what was installed after it."""
        if _concerned(app_label, schema_editor):
            recipe = recipe_for(schema_editor.connection)
            if schema_editor.collect_sql:
                _collect(schema_editor, recipe.unwritten(self.version, bare=self.version == 1))
            else:
                perform(schema_editor.connection, recipe.remove(self.version))

    def describe(self) -> str:
        """Say what this does."""
        return f"Install version {self.version} of Outrider's tables"

    @property
    def migration_name_fragment(self) -> str:
        """Name a migration that consists of this."""
        return f"outrider_{self.version}"


def _concerned(app_label: str, schema_editor: BaseDatabaseSchemaEditor) -> bool:
    connection = schema_editor.connection
    ours = connection.alias == conf.current().database and connection.vendor in VENDORS
    return ours and router.allow_migrate(connection.alias, app_label)


def _collect(schema_editor: BaseDatabaseSchemaEditor, texts: list[str]) -> None:
    for text in texts:
        schema_editor.execute(text, params=None)
