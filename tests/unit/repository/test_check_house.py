"""The figures that `make check` keeps the package to."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_house
from scripts.check_house import LIMITS, Module


def module(path: str, text: str = "") -> Module:
    return Module(Path("outrider", path), text)


def test_every_figure_of_this_package_has_a_limit_and_keeps_it() -> None:
    figures = check_house.measure(check_house.read_package(Path(check_house.__file__).parents[1] / "outrider"))
    assert figures.keys() == LIMITS.keys()
    assert check_house.worse(figures, LIMITS) == []


def test_the_share_of_large_and_small_files_is_counted_in_lines_of_the_product() -> None:
    texts = {"outbox/relay.py": 400, "outbox/lanes.py": 200, "cli/relay.py": 50, "testing/fakes.py": 1000}
    found = check_house.measure(
        [module(path, "\n" * lines) for path, lines in texts.items()] + [module("outbox/__init__.py", "\n" * 900)]
    )
    assert found["package: lines in files over 300, %"] == pytest.approx(61.5)
    assert found["package: lines in files under 100, %"] == pytest.approx(7.7)
    assert found["engines: lines in files under 100, %"] == 0
    assert (found["package: median lines of a file"], found["engines: median lines of a file"]) == (200, 300)
    assert found["largest file, lines"] == 400


def test_a_module_that_one_other_imports_is_found_however_it_is_imported() -> None:
    modules = [
        module("inbox/once.py"),
        module("inbox/often.py"),
        module("a.py", "from outrider.inbox import once, often"),
        module("b.py", "import outrider.inbox.often"),
    ]
    assert check_house.with_one_importer(modules) == ["outrider.inbox.once"]


def test_a_class_name_is_repeated_if_two_modules_define_it_in_public() -> None:
    modules = [
        module("a.py", "class Store: ...\nclass _Private: ..."),
        module("b.py", "class Store: ...\nclass _Private: ...\nclass Other:\n    class Store: ..."),
    ]
    assert check_house.repeated_classes(modules) == ["Store"]


def test_a_gerund_is_no_name_for_a_module_unless_it_is_a_noun_of_the_field() -> None:
    modules = [module("outbox/telling.py"), module("outbox/staging.py"), module("outbox/relay.py")]
    assert check_house.gerunds(modules) == ["outrider.outbox.telling"]


def test_pronouns_are_counted_in_prose_and_not_in_examples() -> None:
    text = '''"""The relay does it, and nobody else.\n\n>>> this, that\n"""'''
    assert check_house.pronouns([module("a.py", text)]) == pytest.approx(28.6)


@pytest.mark.parametrize(
    ("side", "figure", "good"), [("<=", 5, True), ("<=", 6, False), (">=", 5, True), (">=", 4, False)]
)
def test_a_figure_is_worse_on_the_wrong_side_of_its_limit(side: str, figure: float, good: bool) -> None:
    found = check_house.worse({"size": figure}, {"size": (side, 5)})
    assert found == ([] if good else [f"size: {figure:g}, and the limit is 5"])
