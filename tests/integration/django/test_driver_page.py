"""The page on Django: every program runs in a project, before the change and after it, and stages what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.django_project.project import Project
from tests.support.doc_snippets import ROOT, Snippet, compare, sides, snippets

PAGE = ROOT / "docs" / "how-to" / "drivers" / "django.md"
BEFORE = """
import sys
from tests.django_project import shop
from tests.django_project.shop import models
sys.modules.update({"shop": shop, "shop.models": models})
"""
AFTER = """
from inspect import iscoroutinefunction
from asgiref.sync import async_to_sync
from django.test import RequestFactory
if view := globals().get("place_order"):
    view = async_to_sync(view) if iscoroutinefunction(view) else view
    assert view(RequestFactory().post("/", {"number": "A-7"})).content == b"A-7"
if inbox := globals().get("inbox"):
    from tests.support.doc_snippets import deliver
    from outrider.django.conf import store_url
    async_to_sync(deliver)(inbox, store_url("default"))
"""


def check(project: Project, code: str) -> None:
    project.manage("shell", "-c", f"{BEFORE}{code}{AFTER}")
    asyncio.run(compare(code, [project.url]))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("snippet", snippets("python", pages=[PAGE]), ids=str)
def test_a_program_stages_what_it_says(project: Project, snippet: Snippet) -> None:
    assert "\n# staged: " in snippet.code or "\n# published: " in snippet.code
    check(project, snippet.code)


@pytest.mark.parametrize("snippet", snippets("diff", pages=[PAGE]), ids=str)
def test_a_program_stages_nothing_before_the_change_and_its_event_after_it(project: Project, snippet: Snippet) -> None:
    before, after = sides(snippet.code)
    check(project, f"{before}\n# staged: nothing\n")
    # The number is taken by now.
    check(project, f"{after}\nOrder.objects.all().delete()\n# staged: order.placed\n")
