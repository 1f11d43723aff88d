"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import pkgutil
import re
from importlib import import_module

import outrider

# Modules of the Django app can be imported in a Django project only.
SKIPPED = re.compile(r"__main__|^outrider\.django\.")
EXAMPLES_MIN = 20


def test_every_example_in_a_docstring_is_true() -> None:
    found = pkgutil.walk_packages(outrider.__path__, "outrider.")
    names = ["outrider", *(module.name for module in found if not SKIPPED.search(module.name))]
    results = {name: doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS) for name in names}
    assert {name: result.failed for name, result in results.items() if result.failed} == {}
    assert sum(result.attempted for result in results.values()) > EXAMPLES_MIN
