"""Payloads through real processes on every store: refused, corrected, replayed, and encrypted again under SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pymongo import MongoClient

import outrider
from outrider import Event, InvalidEvent
from outrider.app import Outbox
from outrider.payload import Payloads
from outrider.privacy import DataKey, FieldEncryption, KeyRing
from outrider.privacy.keys import KeySet, facts_of

ROOT = Path(outrider.__file__).parent.parent
WAIT_SECONDS = 60
EVENTS = 3_000
MODULE = """
from outrider.payload import Payloads
from outrider.privacy import FieldEncryption, KeyRing

TOTAL = {"type": "object", "properties": {"total": {"type": "integer"}}}
checked = Payloads({"order.placed": {1: TOTAL}})
encrypted = Payloads(
    encryption=FieldEncryption(keys=KeyRing.from_file("ring"), sensitive={"order.placed": ["customer.email"]})
)
"""
CHECKED = Payloads({"order.placed": {1: {"type": "object", "properties": {"total": {"type": "integer"}}}}})
STORES = [
    pytest.param("postgres", marks=pytest.mark.postgres),
    pytest.param("mongo", marks=pytest.mark.mongo),
    pytest.param("sqlite"),
]


class OneKey:
    """A source of one key."""

    where = "the test"

    def __init__(self, key: DataKey) -> None:
        self.key = key

    def read(self) -> KeySet:
        return KeySet({self.key.id: self.key}, self.key.id)

    async def facts(self) -> Any:
        return facts_of(self.read())

    async def add(self, key: DataKey, actor: str) -> bool:
        return False

    async def activate(self, key_id: str, actor: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Site:
    """A service with its store, its directory and its commands."""

    directory: Path
    url: str
    connect: Callable[[], Any]
    """Opens a transaction of the application."""
    insert: Callable[[str, str], str]
    """Inserts a row as another program does: payload and key; returns the id of the event."""
    payloads: Callable[[], Sequence[str]]
    """Reads the payloads of the outbox."""

    def start(self, *args: str, payloads: str) -> subprocess.Popen[str]:
        """Start a command in a process of its own."""
        foreign = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        variables = {
            "OUTRIDER_STORE": self.url,
            "OUTRIDER_BROKER": "embedded:///log.db",
            "OUTRIDER_ACTOR": "ann",
            "OUTRIDER_PAYLOADS": f"shop_payloads:{payloads}",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "outrider", *args],
            cwd=self.directory,
            env={**foreign, **variables, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, code: int = 0, payloads: str = "checked") -> str:
        """Run a command; return what it printed."""
        process = self.start(*args, payloads=payloads)
        output, errors = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == code, (output, errors)
        return output if code != 2 else errors

    def published(self) -> list[str]:
        """Return the bodies in the log, in order."""
        with closing(sqlite3.connect(self.directory / "log.db")) as conn:
            return [bytes(body).decode() for (body,) in conn.execute("SELECT body FROM log ORDER BY rowid")]

    def key_ids(self) -> Counter[str]:
        """Count the events of the outbox by the key of their values."""
        return Counter(json.loads(text)["customer"]["email"]["key"] for text in self.payloads())


@pytest.fixture(params=STORES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "shop_payloads.py").write_text(MODULE)
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        yield Site(tmp_path, url, partial(psycopg.connect, url), partial(_insert_postgres, url), partial(_read, url))
    elif request.param == "mongo":
        url = request.getfixturevalue("mongo_default")
        yield Site(tmp_path, url, partial(_session, url), partial(_insert_mongo, url), partial(_read_mongo, url))
    else:
        path: Path = request.getfixturevalue("sqlite_path")
        sqlite = partial(_insert_sqlite, path), partial(_read_sqlite, path)
        yield Site(tmp_path, f"sqlite:///{path}", partial(_transaction, path), *sqlite)


def _insert_postgres(url: str, payload: str, key: str) -> str:
    event_id = str(uuid4())
    with psycopg.connect(url) as conn:
        sql = "INSERT INTO outrider.outbox (event_id, event_type, topic, payload, key) VALUES (%s, %s, %s, %s, %s)"
        conn.execute(sql, (event_id, "order.placed", "orders", payload, key))
    return event_id


def _read(url: str) -> Sequence[str]:
    with psycopg.connect(url) as conn:
        return [text for (text,) in conn.execute("SELECT payload::text FROM outrider.outbox")]


@contextmanager
def _session(url: str) -> Iterator[Any]:
    with MongoClient[Any](url) as client, client.start_session() as session, session.start_transaction():
        yield session


def _insert_mongo(url: str, payload: str, key: str) -> str:
    event_id = uuid4()
    with MongoClient[Any](url, uuidRepresentation="standard") as client:
        document = {"_id": event_id, "event_type": "order.placed", "topic": "orders", "payload": payload}
        client["outrider"]["outbox"].insert_one({**document, "aggregate_id": key})
    return str(event_id)


def _read_mongo(url: str) -> Sequence[str]:
    with MongoClient[Any](url) as client:
        return [row["payload"] for row in client["outrider"]["outbox"].find({}, {"payload": 1})]


@contextmanager
def _transaction(path: Path) -> Iterator[Any]:
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        yield conn
        conn.execute("COMMIT")


def _insert_sqlite(path: Path, payload: str, key: str) -> str:
    event_id = str(uuid4())
    with closing(sqlite3.connect(path)) as conn, conn:
        sql = "INSERT INTO outbox (event_id, event_type, topic, payload, key) VALUES (?, ?, ?, ?, ?)"
        conn.execute(sql, (event_id, "order.placed", "orders", payload, key))
    return event_id


def _read_sqlite(path: Path) -> Sequence[str]:
    with closing(sqlite3.connect(path)) as conn:
        return [text for (text,) in conn.execute("SELECT payload FROM outbox")]


def test_a_bad_event_is_refused_at_staging_with_its_path_and_nothing_is_stored(site: Site) -> None:
    outbox = Outbox(payloads=CHECKED)
    good, bad = (Event("order.placed", {"total": total}, topic="orders", key="A") for total in (1, "two"))
    with site.connect() as conn:
        with pytest.raises(InvalidEvent, match=r"^events\[1\]\.payload\.total: the value is not of type") as caught:
            outbox.stage_sync(conn, good, bad)
        assert "two" not in str(caught.value)
    assert site.payloads() == []


def test_a_bad_plain_insert_is_dead_lettered_corrected_by_command_and_replayed_in_order(site: Site) -> None:
    _, event_id, _ = (site.insert(f'{{"total": {total}}}', "A") for total in ("1", '"two"', "3"))
    for name, text in (("good", '{"total": 2}'), ("bad", '{"total": "two"}')):
        (site.directory / f"{name}.json").write_text(text)
    site.run("relay", "--until-empty", code=1)
    [letter] = json.loads(site.run("dead-letters", "list", "--json"))
    assert (letter["event_id"], letter["reason"]) == (event_id, "schema_validation_failed")
    shown = json.loads(site.run("dead-letters", "show", event_id, "--json"))
    assert shown["failure"]["error"].startswith("payload.total: ")
    assert site.published() == ['{"total": 1}']
    assert "payload.total" in site.run("dead-letters", "edit", event_id, "--payload-file", "bad.json", code=2)
    site.run("dead-letters", "edit", event_id, "--payload-file", "good.json")
    site.run("dead-letters", "replay", event_id)
    site.run("relay", "--until-empty")
    assert [json.loads(body)["total"] for body in site.published()] == [1, 2, 3]


def test_a_reencryption_that_is_killed_leaves_every_payload_and_the_next_one_finishes(site: Site) -> None:
    old, new = DataKey.new("old"), DataKey.new("new")
    (site.directory / "ring").write_text(f"{new.text}\n{old.text}\n")
    sensitive = {"order.placed": ["customer.email"]}
    payloads = Payloads(encryption=FieldEncryption(keys=KeyRing(OneKey(old)), sensitive=sensitive))
    outbox = Outbox(payloads=payloads)
    events = [Event("order.placed", {"customer": {"email": f"{n}@example.com"}}, key=str(n)) for n in range(EVENTS)]
    with site.connect() as conn:
        outbox.stage_sync(conn, *events)
    process = site.start("keys", "reencrypt", "--json", payloads="encrypted")
    deadline = time.monotonic() + WAIT_SECONDS
    while not site.key_ids()["new"]:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
    process.communicate()
    left = site.key_ids()
    assert (left.total(), left["new"] > 0, left["old"] > 0) == (EVENTS, True, True)
    done = json.loads(site.run("keys", "reencrypt", "--json", payloads="encrypted"))
    assert (done["written"]["event"], done["complete"], done["count"]) == (left["old"], True, 0)
    assert site.key_ids() == {"new": EVENTS}
    both = FieldEncryption(keys=KeyRing.from_file(site.directory / "ring"), sensitive=sensitive)
    assert both.key_ids([json.loads(text) for text in site.payloads()]) == {"new"}
    shown = json.loads(site.run("events", "list", "--json", "--limit", "1", payloads="encrypted"))
    event = json.loads(site.run("events", "show", shown[0]["event_id"], "--payload", "--json", payloads="encrypted"))
    assert event["payload"]["customer"]["email"] == f"{shown[0]['key']}@example.com"
