"""The documentation site: it builds without a warning, every link leads somewhere, and no page asks another host."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from scripts import site_hooks
from scripts.docstring_markdown import to_markdown
from tests.support.doc_snippets import ROOT

LOADED = {"src", "srcset", "poster", "data", "action", "formaction"}
"""Attributes whose URL a browser asks for by itself, or sends a form to."""


@dataclass
class Page(HTMLParser):
    """The anchors, links and loaded resources of one page."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.classes |= set(given.get("class", "").split())
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "href" in given and given.get("rel") != "canonical":
            self.resources.append(given["href"])
        self.resources += [given[name] for name in LOADED & given.keys() if ":" not in name]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {}
    for path in site.rglob("*.html"):
        found[path] = Page()
        found[path].feed(path.read_text())
    return found


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site: Path, pages: dict[Path, Page]) -> None:
    broken = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        for link in [*page.links, *page.resources]
        if not urlsplit(link).scheme and not leads_somewhere(link, path, site, pages)
    ]
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 500


def leads_somewhere(link: str, source: Path, site: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    name, anchor = unquote(parts.path), unquote(parts.fragment)
    target = ((site if name.startswith("/") else source.parent) / name.lstrip("/")).resolve() if name else source
    target = target / "index.html" if target.is_dir() else target
    if target.suffix != ".html":
        return target.exists()
    return target in pages and (not anchor or anchor in pages[target].ids)


def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    asked = {url for page in pages.values() for url in page.resources if urlsplit(url).scheme or urlsplit(url).netloc}
    styles = [text for path in site.rglob("*.css") for text in re.findall(r"url\(([^)]*)\)|@import", path.read_text())]
    assert {url for url in asked if not url.startswith("data:")} == set()
    assert [url for url in styles if not url.strip("'\"").startswith(("data:", "#", ".", "var("))] == []
    # The theme fetches the program that draws these from a server of its own.
    assert not any("mermaid" in page.classes for page in pages.values())


def test_the_public_names_of_the_package_are_in_the_reference(site: Path, pages: dict[Path, Page]) -> None:
    import outrider

    reference = pages[site / "reference" / "api" / "outrider.html"]
    assert {f"outrider.{name}" for name in outrider.__all__} <= reference.ids


def test_a_doctest_and_a_literal_block_of_a_docstring_become_code() -> None:
    docstring = "Add.\n\n>>> 1 + 1\n2\n\nLike this::\n\n    add()"
    assert to_markdown(docstring) == "Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nLike this:\n\n    add()"


def test_the_examples_of_the_hooks_hold() -> None:
    failed, attempted = doctest.testmod(site_hooks)
    assert (failed, attempted > 0) == (0, True)
