"""Installing the PostgreSQL store, as texts: no driver is needed here."""

from __future__ import annotations

from outrider.stores import migrations, queries
from outrider.stores.migrations import Step
from outrider.stores.postgres.queries import constants
from outrider.stores.recipe import LATER, Recipe

DAYS_AHEAD = 7
"""For how many days the archive's partitions are made in advance, today's besides."""

_PACKAGE = "outrider.stores.postgres"


def recipe(schema: str) -> Recipe:
    """Return how one schema is installed.

    >>> recipe("shop").written(1, 32)[1]
    'CREATE SCHEMA IF NOT EXISTS shop'
    """
    known = {**constants(schema), **LATER, "days_ahead": str(DAYS_AHEAD)}
    texts = {
        name: text
        for file in ("schema", "removal")
        for name, text in queries.load(_PACKAGE, f"sql/{file}.sql", known).items()
    }

    def steps(lanes: int) -> list[Step]:
        return migrations.steps(_PACKAGE, constants(schema, lanes))

    return Recipe(
        steps,
        texts,
        begin=("create_schema", "create_record"),
        turn=("take_turn",),
        finish={1: "partitions_ahead"},
    )
