"""Installing the SQLite store, as texts: for our own connection, or for somebody else's."""

from __future__ import annotations

import re
from dataclasses import replace

from outrider.event import BANDS
from outrider.stores import migrations, queries
from outrider.stores.migrations import Step
from outrider.stores.recipe import LATER, Recipe
from outrider.stores.sqlite.rows import PACKAGE

_NUMBER = re.compile(r":(lanes|bands)\b")


def recipe() -> Recipe:
    """Return how a database file is installed.

    >>> len(recipe().steps(32)) > 30
    True
    """
    known = {**queries.constants(), **LATER}
    texts = {
        name: text
        for file in ("schema", "removal")
        for name, text in queries.load(PACKAGE, f"sql/{file}.sql", known).items()
    }
    return Recipe(steps, texts, begin=("create_record",))


def steps(lanes: int) -> list[Step]:
    """Return all steps with their numbers filled in.

    >>> [step.sql.rsplit(None, 2)[-1] for step in steps(8) if step.name == "lanes"]
    ['8);']
    """
    numbers = {"lanes": str(lanes), "bands": str(BANDS)}
    known = migrations.steps(PACKAGE, queries.constants())
    return [replace(step, sql=_NUMBER.sub(lambda found: numbers[found[1]], step.sql)) for step in known]
