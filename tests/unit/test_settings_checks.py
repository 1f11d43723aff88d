"""The range of a number, and the errors for values outside of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import InvalidSetting
from outrider.settings_checks import Range, check_ranges


@pytest.mark.parametrize(
    ("allowed", "value", "said"),
    [
        (Range(1, 64, whole=True), 65, "x = 65 cannot work; use a whole number from 1 to 64"),
        (Range(1, 64, whole=True), 2.0, "x = 2.0 cannot work; use a whole number"),
        (Range(above=0), 0, "use a number above 0"),
        (Range(above=0), True, "x = True cannot work"),
        (Range(above=0), "1", "x = '1' cannot work"),
        (Range(above=0), None, "x = None cannot work"),
        (Range(above=0), float("nan"), "x = nan cannot work"),
        (Range(0, below=1), 1, "use a number from 0 to below 1"),
    ],
)
def test_a_value_outside_its_range_is_rejected_by_name(allowed: Range, value: Any, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        check_ranges(SimpleNamespace(x=value), {"x": allowed})


def test_an_optional_setting_may_be_none() -> None:
    check_ranges(SimpleNamespace(x=None, y=64), {"x": Range(above=0, optional=True), "y": Range(1, 64, whole=True)})
