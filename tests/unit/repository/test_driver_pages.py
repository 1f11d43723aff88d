"""The pages of the drivers: changes are short, the index is complete, and every accepted type is named."""

from __future__ import annotations

import re

import pytest

from outrider.drivers.detect import DRIVERS_BY_TYPE, Mode
from tests.support.doc_snippets import ROOT, snippets

DRIVERS = ROOT / "docs" / "how-to" / "drivers"
STAGING = ROOT / "docs" / "how-to" / "staging.md"
ADDED_LINES_MAX = 5


@pytest.mark.parametrize("name", sorted({page.name for page in DRIVERS.glob("*.md")} - {"README.md"}))
def test_a_page_shows_a_change_of_at_most_five_lines(name: str) -> None:
    changes = snippets("diff", pages=[DRIVERS / name])
    assert changes
    for change in changes:
        changed = [line for line in change.code.splitlines() if line[:1] in ("+", "-")]
        assert 0 < len(changed) <= ADDED_LINES_MAX, change


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\((\w+\.md)\)", (DRIVERS / "README.md").read_text()))
    assert named == {page.name for page in DRIVERS.glob("*.md")} - {"README.md"}


def test_the_page_on_staging_names_every_type_that_is_accepted_and_how() -> None:
    table = re.findall(r"^\| \[([a-zA-Z0-9]+).*?\] *\([^|]*\| (.*?)\| (.*?)\|$", STAGING.read_text(), re.MULTILINE)
    rows = {driver.lower(): (awaited, plain) for driver, awaited, plain in table}
    assert rows.keys() == {"memory" if package == "outrider" else package for package, _ in DRIVERS_BY_TYPE}
    # A handler transaction is the worker's own, and no page needs it.
    for (package, kind), info in (
        (known, info) for known, info in DRIVERS_BY_TYPE.items() if known != ("outrider", "HandlerTransaction")
    ):
        awaited, plain = rows["memory" if package == "outrider" else package]
        assert (f"`{kind}`" in awaited) == (info.mode is not Mode.SYNC), kind
        assert (f"`{kind}`" in plain) == (info.mode is not Mode.ASYNC), kind
