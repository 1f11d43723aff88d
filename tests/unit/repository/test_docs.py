"""The pages of the documentation: links, commands, queues and the glossary. Tests of integration run the snippets."""

from __future__ import annotations

import re

import pytest

from outrider.brokers.rabbitmq.management import takes
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.event import default_topic
from scripts import check_links
from tests.support.doc_snippets import PAGES, ROOT, snippets


def test_every_url_that_a_shell_would_take_apart_is_quoted() -> None:
    lines = [line for snippet in snippets("console") for line in snippet.code.splitlines()]
    bare = [line for line in lines if re.search(r"://[^\s']*[?&*]", re.sub(r"'[^']*'", "", line))]
    assert bare == []
    assert any("'amqp://" in line for line in lines)


def test_every_queue_that_the_documentation_declares_takes_events_without_a_topic_of_their_own() -> None:
    declared = re.findall(r"declare=([a-z][^`'\s]*)", "\n".join(page.read_text() for page in PAGES))
    assert declared
    for text in declared:
        for name, pattern in RabbitSettings.from_url(f"amqp://localhost?declare={text}").queues:
            assert takes("topic", pattern, default_topic("order.placed", None, None)), (name, pattern)


def test_every_command_in_the_documentation_exists() -> None:
    shown = "\n".join(snippet.code for snippet in snippets("console"))
    commands = re.findall(r"^\$ (outrider [a-z-]+(?: [a-z-]+)?)", shown, re.MULTILINE)
    reference = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    assert commands
    for command in commands:
        assert f"## `{command}`" in reference or f"## `{command.rsplit(' ', 1)[0]}`" in reference, command


def test_every_link_in_the_markdown_files_leads_to_a_file_and_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_links.main() == 0, capsys.readouterr().out


def test_the_glossary_has_at_most_fifteen_words_of_our_own() -> None:
    ours, of_the_field = (ROOT / "docs" / "glossary.md").read_text().split("## Words of the field")
    words = re.findall(r"^\| (\w[^|]*?) \|", ours.partition("|---|---|")[2], re.MULTILINE)
    assert 10 <= len(words) <= 15
    assert all(f"| {word} |" not in of_the_field for word in words)


def test_every_page_is_a_tutorial_a_guide_reference_or_an_explanation() -> None:
    folders = {page.relative_to(ROOT / "docs").parts[0] for page in PAGES if page != ROOT / "README.md"}
    assert folders == {"README.md", "glossary.md", "tutorial", "how-to", "reference", "explanation"}


def test_no_file_of_a_tutorial_is_left_to_the_reader() -> None:
    tutorials = [page for page in PAGES if page.parent.name == "tutorial"]
    assert len(tutorials) == 3
    # Blocks with a file's name are run by the test of the tutorials; one without would be run by nothing.
    assert snippets("python", "sql", "diff", pages=tutorials) == []
