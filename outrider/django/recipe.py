"""Installing, and asking what is installed, through one of Django's connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError

from outrider.app import install_recipe
from outrider.django import conf
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from outrider.stores.recipe import Recipe, Script, T

VENDORS = ("postgresql", "sqlite")


def recipe_for(connection: BaseDatabaseWrapper) -> Recipe:
    """Return how Outrider is installed in a database.

    ```python
    perform(connection, recipe_for(connection).status())
    ```
    """
    return install_recipe(connection.vendor, schema=conf.current().schema)


def perform(connection: BaseDatabaseWrapper, script: Script[T]) -> T:
    """Run a script through a connection, in its transaction if it has one; what we refuse is told in one line.

    ```python
    perform(connection, recipe_for(connection).install(version=3, lanes=32))
    ```
    """
    with connection.cursor() as cursor:

        def execute(text: str) -> Sequence[Sequence[Any]]:
            # Without parameters, so that a percent sign stands for itself.
            cursor.execute(text)
            return cursor.fetchall() if cursor.description else ()

        try:
            return recipe_for(connection).perform(script, execute)
        except OutriderError as error:
            raise CommandError(str(error)) from error
