"""MkDocs hooks: pages from outside docs/ join the site, and links between the two halves are rewritten.

A link to a file that is no page of the site, such as a source file, becomes plain text.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PROJECT = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changes.md",
    "SECURITY.md": "project/security.md",
    "examples/fastapi_shop/README.md": "project/fastapi-shop.md",
    "examples/order_saga/README.md": "project/order-saga.md",
}
"""The pages outside docs/, by their path in the repository, and their path on the site."""

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^()\s#]+)(#[^()\s]*)?\)")
_FENCE = re.compile(r"^ {0,3}(`{3,}).*?^ {0,3}\1\s*?$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/."""
    for source, page in PROJECT.items():
        content = relocate((ROOT / source).read_text(encoding="utf-8"), source, page)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page in docs/ that lead out of docs/."""
    uri = page.file.src_uri
    return markdown if uri in PROJECT.values() else relocate(markdown, f"docs/{uri}", uri)


def relocate(markdown: str, source: str, page: str) -> str:
    """Return a file's text with its links as they must be on the site.

    >>> relocate("[the relay](../../docs/how-to/relay.md#order)", "examples/a/README.md", "project/a.md")
    '[the relay](../how-to/relay.md#order)'
    >>> relocate("[`run.py`](run.py)", "examples/a/README.md", "project/a.md")
    '`run.py`'
    """

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        on_site = path.removeprefix("docs/") if path.startswith("docs/") else PROJECT.get(path)
        return f"[{text}]({os.path.relpath(on_site, os.path.dirname(page) or '.')}{anchor})" if on_site else text

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, markdown[end:])])
