"""A topic rule of the user's own, through the command line and on a SQLite file."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.cli.test_commands import Shell, bare, shell

__all__ = ["bare", "shell"]

RULES = """
prefix = "mine"

def by_type(event_type, topic, routing_key):
    return f"{prefix}.{event_type}"
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_topics.py").write_text(RULES)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Child processes find it as well.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_topics", raising=False)


def insert(shell: Shell) -> str:
    """Insert a row as another program would, without a topic."""
    with closing(sqlite3.connect(shell.path, isolation_level=None)) as conn:
        sql = "INSERT INTO outbox (event_type, payload, key) VALUES ('order.placed', '{}', 'A') RETURNING event_id"
        return str(conn.execute(sql).fetchone()[0])


def published(shell: Shell) -> list[str]:
    with closing(sqlite3.connect(shell.path.parent / "log.db")) as conn:
        return [topic for (topic,) in conn.execute("SELECT topic FROM log")]


def test_a_rule_named_as_an_option_holds_for_publish_and_archive(shell: Shell) -> None:
    event_id = insert(shell)
    shell("relay", "--until-empty", "--topic-rule", "shop_topics:by_type")
    assert published(shell) == ["mine.order.placed"]
    assert shell.json("events", "show", event_id)["topic"] == "mine.order.placed"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_rule_named_in_the_file_reaches_every_process(shell: Shell, tmp_path: Path, processes: str) -> None:
    filed = tmp_path / "outrider.yaml"
    filed.write_text("relay: {topic_rule: 'shop_topics:by_type'}\n")
    event_id = insert(shell)
    shell("relay", "--until-empty", "--processes", processes, "--config", str(filed))
    assert published(shell) == ["mine.order.placed"]
    assert shell.json("events", "show", event_id)["topic"] == "mine.order.placed"


def test_a_rule_named_in_the_environment_is_used(shell: Shell) -> None:
    insert(shell)
    shell("relay", "--until-empty", OUTRIDER_TOPIC_RULE="shop_topics:by_type")
    assert published(shell) == ["mine.order.placed"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("shop_topics", "names no topic rule"),
        ("shop_missing:by_type", "there is no module shop_missing here"),
        ("shop_topics:by_tipe", "the topic rule shop_topics:by_tipe does not exist"),
        ("shop_topics:prefix", "the topic rule shop_topics:prefix is not a function"),
    ],
)
def test_a_rule_that_cannot_be_used_is_rejected_before_the_relay_starts(shell: Shell, target: str, said: str) -> None:
    event_id = insert(shell)
    assert said in shell("relay", "--until-empty", "--topic-rule", target, code=2).stderr
    assert shell.json("events", "show", event_id)["state"] == "pending"
