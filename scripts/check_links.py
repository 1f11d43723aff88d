"""Checks that every relative link in the Markdown files leads to a file, and every anchor to a heading.

Anchors follow GitHub's slug rules. Links to other sites are left alone: a check must not depend on the network.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*$")
HTML_ANCHOR = re.compile(r"<[a-z]+[^>]*\s(?:id|name)=[\"']([^\"']+)[\"']", re.IGNORECASE)
INLINE_LINK = re.compile(r"\]\(\s*(?:<([^>]*)>|((?:[^\s()]|\([^\s()]*\))+))(?:\s+[\"'(].*?[\"')])?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?([^\s>]+)>?")
HTML_LINK = re.compile(r"<(?:a|img|source)\b[^>]*\s(?:href|src)=[\"']([^\"']+)[\"']", re.IGNORECASE)
ELSEWHERE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


def markdown_files() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(path for name in set(listed.split("\0")) if name and (path := ROOT / name).is_file())


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a file outside fenced code."""
    fence = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            yield number, line


def slug(heading: str) -> str:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"<[^>]+>", "", text)
    # Underscores around a word are emphasis, those within one are part of it.
    text = re.sub(r"(?<!\w)_+(?=\w)|(?<=[^\W_])_+(?!\w)", "", text)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for _, line in prose(path):
        found.update(HTML_ANCHOR.findall(line))
        if heading := HEADING.match(line):
            name = slug(heading[1])
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return frozenset(found)


def links(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in prose(path):
        # Blank out code spans, but keep a span that is itself the text of a link.
        text = CODE_SPAN.sub("code", line)
        for match in INLINE_LINK.finditer(text):
            yield number, match[1] or match[2]
        for pattern in (REFERENCE, HTML_LINK):
            yield from ((number, target) for target in pattern.findall(text))


def problem(source: Path, link: str) -> str | None:
    """What is wrong with a link, or nothing."""
    if ELSEWHERE.match(link):
        return None
    name, _, anchor = unquote(link).partition("#")
    base = ROOT if name.startswith("/") else source.parent
    target = (base / name.lstrip("/")).resolve() if name else source
    if not target.is_relative_to(ROOT):
        return f"{link} leads out of the repository"
    if not target.exists():
        return f"{link} leads to no file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"{link} names no heading of {target.relative_to(ROOT)}"
    return None


def main() -> int:
    files = markdown_files()
    findings = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for path in files
        for number, link in links(path)
        if (text := problem(path, link))
    ]
    print("\n".join(findings) or f"Links: {len(files)} files, all good.")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
