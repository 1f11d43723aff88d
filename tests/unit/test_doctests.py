"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import pkgutil
import re
from importlib import import_module

import pytest

import outrider

# What is inside the Django app can be imported in a Django project only.
SKIPPED = re.compile(r"__main__|^outrider\.django\.")
MODULES = [
    "outrider",
    *(found.name for found in pkgutil.walk_packages(outrider.__path__, "outrider.") if not SKIPPED.search(found.name)),
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    failed, _ = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(len(test.examples) for name in MODULES for test in finder.find(import_module(name)))
    assert examples > 20
