"""How much the long tests do: everything in `make prove`, a tenth or so in `make test`, less in `make test-quick`.

A size changes how often a rule is tried, never the rule.
"""

from __future__ import annotations

import os

VARIABLE = "OUTRIDER_TEST_SIZE"
SIZE = os.environ.get(VARIABLE) or "usual"
FULL = SIZE == "full"


def sized(full: int, usual: int, quick: int | None = None) -> int:
    """Return the number for the size in OUTRIDER_TEST_SIZE: full, usual (the default) or quick."""
    sizes = {"full": full, "usual": usual, "quick": usual if quick is None else quick}
    if SIZE not in sizes:
        raise ValueError(f"{VARIABLE} is {SIZE!r}; choose from {', '.join(sizes)}")
    return sizes[SIZE]
