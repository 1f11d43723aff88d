"""Measures the shape of the package, prints it, and fails if a figure is worse than its limit.

With --list it names the modules and classes that were counted.

The limits are the figures that were last reached: they may be tightened, and loosened only with a reason.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMITS: dict[str, tuple[str, float]] = {
    "package: lines in files over 300, %": (">=", 40),
    "package: lines in files under 100, %": ("<=", 6),
    "package: median lines of a file": (">=", 190),
    "engines: lines in files over 300, %": (">=", 40),
    "engines: lines in files under 100, %": ("<=", 4),
    "engines: median lines of a file": (">=", 200),
    "largest file, lines": ("<=", 700),
    "modules with one importer, %": ("<=", 32),
    "class names defined twice": ("<=", 0),
    "modules named by a gerund": ("<=", 0),
    "pronouns per 100 words of docstring": ("<=", 6),
}
"""By figure: which side of the limit is good, and the limit."""

ENGINES = ("outbox", "inbox", "saga")
OUTSIDE = ("testing", "demo")
"""Parts of the package that are no part of the product."""
LARGE, SMALL = 300, 100
PRONOUN = re.compile(
    r"\b(it|its|that|this|what|whatever|those|these|one|ones|who|whoever|whose|whom|nobody|somebody|anybody|nothing|"
    r"something|such|so|them|they|another|others|both|each)\b",
    re.IGNORECASE,
)
CODE = re.compile(r">>>|::\n|```")
"""Where the prose of a docstring ends."""
GERUND = re.compile(r"[a-z_]*[a-z]{2}ing$")
NOUNS = {"sequencing", "staging"}
"""Words in -ing that are terms of the field."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Module:
    """One file of the package."""

    path: Path
    """Relative to the folder that holds the package."""
    text: str

    @property
    def name(self) -> str:
        """The dotted name, by which others import it."""
        return ".".join(self.path.with_suffix("").parts)

    @property
    def lines(self) -> int:
        """How long the file is."""
        return self.text.count("\n")

    @property
    def part(self) -> str:
        """The folder or module directly below the package."""
        return self.path.with_suffix("").parts[1]

    @property
    def is_ordinary(self) -> bool:
        """Whether its name and its size were chosen by us, and not by Python or a framework."""
        return self.path.name not in ("__init__.py", "__main__.py") and "migrations" not in self.path.parts


def read_package(root: Path) -> list[Module]:
    """Read all modules of a package."""
    return [Module(path.relative_to(root.parent), path.read_text("utf-8")) for path in sorted(root.rglob("*.py"))]


def product_of(modules: Sequence[Module]) -> list[Module]:
    """Return the ordinary modules that are part of the product."""
    return [module for module in modules if module.is_ordinary and module.part not in OUTSIDE]


def measure(modules: Sequence[Module]) -> dict[str, float]:
    """Return every figure that has a limit."""
    product = product_of(modules)
    engines = [module for module in product if module.part in ENGINES]
    sizes = {"package": [module.lines for module in product], "engines": [module.lines for module in engines]}
    figures: dict[str, float] = {}
    for name, lines in sizes.items():
        figures[f"{name}: lines in files over {LARGE}, %"] = _share(sum(n for n in lines if n > LARGE), sum(lines))
        figures[f"{name}: lines in files under {SMALL}, %"] = _share(sum(n for n in lines if n < SMALL), sum(lines))
        figures[f"{name}: median lines of a file"] = statistics.median(lines or [0])
    figures["largest file, lines"] = max(sizes["package"], default=0)
    ordinary = [module for module in modules if module.is_ordinary]
    figures["modules with one importer, %"] = _share(len(with_one_importer(modules)), len(ordinary))
    figures["class names defined twice"] = len(repeated_classes(product))
    figures["modules named by a gerund"] = len(gerunds(product))
    figures["pronouns per 100 words of docstring"] = pronouns(modules)
    return figures


def with_one_importer(modules: Sequence[Module]) -> list[str]:
    """Return the modules that exactly one other module of the package imports."""
    known = {module.name for module in modules if module.is_ordinary}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in _imports(module):
            if name in known and name != module.name:
                importers[name].add(module.name)
    return sorted(name for name, found in importers.items() if len(found) == 1)


def repeated_classes(modules: Sequence[Module]) -> list[str]:
    """Return the names of public classes that more than one module defines."""
    nodes = (node for module in modules for node in ast.parse(module.text).body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    return sorted(name for name, count in names.items() if count > 1)


def gerunds(modules: Sequence[Module]) -> list[str]:
    """Return the modules whose names say an activity where a thing is expected."""
    return [module.name for module in modules if GERUND.fullmatch(module.path.stem) and module.path.stem not in NOUNS]


def pronouns(modules: Sequence[Module]) -> float:
    """Return the number of words that stand for other words, per 100 words of docstring."""
    prose = " ".join(text for module in modules for text in _docstrings(module))
    return round(100 * len(PRONOUN.findall(prose)) / max(1, len(prose.split())), 1)


def worse(figures: Mapping[str, float], limits: Mapping[str, tuple[str, float]]) -> list[str]:
    """Return a sentence for each figure on the wrong side of its limit."""
    return [
        f"{name}: {figures[name]:g}, and the limit is {limit:g}"
        for name, (side, limit) in limits.items()
        if not (figures[name] <= limit if side == "<=" else figures[name] >= limit)
    ]


def _share(part: int, whole: int) -> float:
    return round(100 * part / max(1, whole), 1)


def _imports(module: Module) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _docstrings(module: Module) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield CODE.split(text)[0]


def main() -> int:
    """Print the figures; return 1 if one of them is worse than its limit."""
    modules = read_package(Path(__file__).resolve().parent.parent / "outrider")
    figures = measure(modules)
    if "--list" in sys.argv:
        product = product_of(modules)
        print(f"One importer: {', '.join(with_one_importer(modules))}")
        print(f"Defined twice: {', '.join(repeated_classes(product))}")
        print(f"Gerunds: {', '.join(gerunds(product))}")
    for name, (side, limit) in LIMITS.items():
        print(f"{name:<38} {figures[name]:>7g}   {side} {limit:g}")
    found = worse(figures, LIMITS)
    for sentence in found:
        print(f"Worse than before: {sentence}.", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
