"""The operation of Outrider's migrations: runs the steps of `outrider db migrate`, and writes the same records.

Both commands may be used. The first command installs a version; the other finds the record, checks that the SQL texts
are the same, and skips the version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.db import router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation

from outrider.app import installer_for
from outrider.django import conf
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from outrider.stores.migrations import Installer, Statements, T


VENDORS = ("postgresql", "sqlite")


class Install(Operation):
    """Bring Outrider's tables up to a version, only in the database that OUTRIDER["DATABASE"] names.

    The reverse operation drops the tables, with archive, receipts and journals. It is rejected while the database
    contains undelivered events, undecided dead letters or running sagas.
    """

    def __init__(self, version: int) -> None:
        self.version = version

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the constructor arguments for Django's migration writer."""
        return type(self).__qualname__, [self.version], {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Leave the state unchanged: the models are not managed."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run the pending steps; for `sqlmigrate`, write all steps."""
        if _concerned(app_label, schema_editor):
            installer, lanes = connection_installer(schema_editor.connection), conf.current().lanes
            if schema_editor.collect_sql:
                _collect(schema_editor, installer.written(self.version, lanes, after=self.version - 1))
            else:
                perform(schema_editor.connection, installer.install(self.version, lanes))

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Remove this version and all later versions."""
        if _concerned(app_label, schema_editor):
            installer = connection_installer(schema_editor.connection)
            if schema_editor.collect_sql:
                _collect(schema_editor, installer.unwritten(self.version, bare=self.version == 1))
            else:
                perform(schema_editor.connection, installer.remove(self.version))

    def describe(self) -> str:
        """Describe the operation for `migrate --plan`."""
        return f"Install version {self.version} of Outrider's tables"

    @property
    def migration_name_fragment(self) -> str:
        """Return the name fragment for generated migrations."""
        return f"outrider_{self.version}"


def _concerned(app_label: str, schema_editor: BaseDatabaseSchemaEditor) -> bool:
    connection = schema_editor.connection
    ours = connection.alias == conf.current().database and connection.vendor in VENDORS
    return ours and router.allow_migrate(connection.alias, app_label)


def _collect(schema_editor: BaseDatabaseSchemaEditor, texts: list[str]) -> None:
    for text in texts:
        schema_editor.execute(text, params=None)


def connection_installer(connection: BaseDatabaseWrapper) -> Installer:
    """Return the installer for a database.

    ```python
    perform(connection, connection_installer(connection).status())
    ```
    """
    return installer_for(connection.vendor, schema=conf.current().schema)


def perform(connection: BaseDatabaseWrapper, statements: Statements[T]) -> T:
    """Run a script through a connection, in its transaction if open. Outrider's rejections become one-line errors.

    ```python
    perform(connection, connection_installer(connection).install(version=4, lanes=None))
    ```
    """
    with connection.cursor() as cursor:

        def execute(text: str) -> Sequence[Sequence[Any]]:
            # Without parameters the driver does not interpret percent signs.
            cursor.execute(text)
            return cursor.fetchall() if cursor.description else ()

        try:
            return connection_installer(connection).run(statements, execute)
        except OutriderError as error:
            raise CommandError(str(error)) from error
