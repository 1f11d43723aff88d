"""`outrider consume module:inbox` with a module on disk, and what the doctor says about its receipts."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest

import outrider
from outrider import Event
from outrider.testing.servers.kafka import create_topic

ROOT = Path(outrider.__file__).parent.parent
WAIT_SECONDS = 30
MODULE = """
import sqlite3
from outrider import Event, Inbox, RetryPolicy

inbox = Inbox()
spare = Inbox()
number = 7


@inbox.handler("order.placed", consumer="billing", topic="orders")
def bill(event: Event, tx: sqlite3.Connection) -> None:
    if event.payload["broken"]:
        raise ValueError("no such price")
    tx.execute("INSERT INTO effects (consumer, key) VALUES ('billing', ?)", (event.key,))


@inbox.handler("order.placed", consumer="stats", topic="orders")
def count(event: Event, tx: sqlite3.Connection) -> None:
    tx.execute("INSERT INTO effects (consumer, key) VALUES ('stats', ?)", (event.key,))


inbox.consumer("billing", retry=RetryPolicy(max_attempts=2, base_seconds=0.01), receipt_days=3)
"""


class Service:
    """A service in a directory of its own: its module, its database, the log it reads from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "store.db"
        foreign = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        variables = {"OUTRIDER_STORE": "sqlite:///store.db", "OUTRIDER_BROKER": "embedded:///log.db"}
        self.environment = {**foreign, **variables, "PYTHONPATH": str(ROOT)}
        self.write_module("orders")

    def write_module(self, topic: str) -> None:
        (self.directory / "handlers.py").write_text(MODULE.replace('"orders"', f'"{topic}"'))

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "outrider", *args],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, code: int = 0) -> tuple[str, str]:
        with self.start(*args) as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == code, (out, err)
        return out, err

    def usage_error(self, *args: str, code: int = 2) -> str:
        """Return the text of the error."""
        return str(json.loads(self.run("consume", *args, "--json", code=code)[1].splitlines()[-1])["error"])

    def deliver(self, *keys: str, broken: bool = False) -> None:
        """Stage events, and let a relay publish them."""
        self.stage(*keys, broken=broken)
        self.run("relay", "--until-empty")

    def stage(self, *keys: str, broken: bool = False) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as conn:
            conn.execute("BEGIN IMMEDIATE")
            outrider.stage_sync(
                conn, *(Event("order.placed", {"broken": broken}, topic="orders", key=key) for key in keys)
            )
            conn.execute("COMMIT")

    def relays(self) -> int:
        """Return how many relays have not given back their lanes."""
        with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS)) as conn:
            [(count,)] = conn.execute("SELECT count(*) FROM outbox_relay")
            return int(count)

    def effects(self, consumer: str = "billing") -> list[str]:
        with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS)) as conn:
            rows = conn.execute("SELECT key FROM effects WHERE consumer = ? ORDER BY rowid", (consumer,))
            return [key for (key,) in rows]

    def results(self, *args: str, code: int = 0) -> list[dict[str, str]]:
        """Return what the doctor says of receipts, in the order of consumers."""
        output = json.loads(self.run("doctor", "--consume", "handlers:inbox", *args, "--json", code=code)[0])
        found = [found for found in output["results"] if found["check"] == "receipts-shorter-than-retention"]
        return sorted(found, key=lambda each: each["text"])


NOTHING = dict.fromkeys(
    ("applied", "duplicates", "dropped", "no_handler", "erased", "waiting", "dead_lettered", "unhandled"), 0
)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    made = Service(tmp_path)
    made.run("db", "migrate")
    with closing(sqlite3.connect(made.path)) as conn:
        conn.execute("CREATE TABLE effects (consumer TEXT NOT NULL, key TEXT NOT NULL)")
    return made


def until_idle(service: Service, *options: str) -> dict[str, int]:
    output: dict[str, int] = json.loads(
        service.run("consume", "handlers:inbox", "--until-idle", "0.5", "--json", *options)[0]
    )
    return output


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("handlers", "write module:name"),
        (":inbox", "write module:name"),
        ("handlers:", "write module:name"),
        ("nowhere:inbox", "there is no module nowhere here"),
        ("handlers.deeper:inbox", "there is no module handlers.deeper here"),
        ("handlers:inbx", "did you mean handlers:inbox?"),
        ("handlers:number", "handlers:number is not an inbox"),
        ("json:inbox", "define one: inbox = outrider.Inbox()"),
        ("handlers:spare", "handlers:spare has no handlers"),
    ],
)
def test_an_object_that_is_no_inbox_is_rejected_with_the_fix(tmp_path: Path, target: str, words: str) -> None:
    assert words in Service(tmp_path).usage_error(target)


@pytest.mark.parametrize(
    ("source", "words", "traced"),
    [
        ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing' (broken.py, line 1)", True),
        ("x = 1\n\ny = x / 0\n", "ZeroDivisionError: division by zero (broken.py, line 3)", True),
        ("def f(:\n", "SyntaxError: invalid syntax (broken.py, line 1)", True),
        ("from outrider import Inbox\nInbox().handler()\n", "the type of its events", False),
        ("from outrider import Inbox\nInbox().consumer('b', orderin=1)\n", "did you mean ordering? (broken.py", False),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_with_its_own_traceback(
    tmp_path: Path, source: str, words: str, traced: bool
) -> None:
    service = Service(tmp_path)
    (tmp_path / "broken.py").write_text(source)
    output = service.run("consume", "broken:inbox", code=2)[1]
    assert "outrider: broken cannot be imported: " in output
    assert words in output.splitlines()[-1]
    assert ("broken.py" in output.partition("outrider: ")[0]) == traced
    assert "importlib" not in output
    assert "find_inbox" not in output


def test_an_unknown_consumer_is_rejected_and_the_known_are_named(service: Service) -> None:
    assert "(there are: billing, stats)" in service.usage_error("handlers:inbox", "--consumer", "biling")


def test_a_database_without_an_inbox_is_rejected(tmp_path: Path) -> None:
    assert "outrider db migrate" in Service(tmp_path).usage_error("handlers:inbox")


def test_a_broker_without_a_source_is_rejected(service: Service) -> None:
    assert "broker to consume from" in service.usage_error("handlers:inbox", "--broker", "null://")


def test_every_consumer_has_each_effect_once_however_often_it_is_run(service: Service) -> None:
    service.deliver("a", "b", "a")
    counts = until_idle(service)
    assert counts == {**NOTHING, "applied": 6}
    assert sorted(service.effects("billing")) == sorted(service.effects("stats")) == ["a", "a", "b"]
    assert set(until_idle(service).values()) == {0}
    assert "0 applied, 0 duplicates" in service.run("consume", "handlers:inbox", "--until-idle", "0.3")[0]
    assert len(service.effects("billing")) == 3


def test_what_is_tried_again_keeps_a_consumer_from_being_idle(service: Service) -> None:
    module = service.directory / "handlers.py"
    module.write_text(module.read_text().replace("base_seconds=0.01", "base_seconds=2, jitter=0"))
    service.deliver("a", broken=True)
    counts = until_idle(service, "--consumer", "billing")
    assert counts == {**NOTHING, "dead_lettered": 1}


def test_a_handler_that_ends_its_transaction_stops_the_consumer_as_wrong_usage(service: Service) -> None:
    module = service.directory / "handlers.py"
    module.write_text(
        module.read_text().replace(
            "VALUES ('stats', ?)\", (event.key,))", "VALUES ('stats', ?)\", (event.key,))\n    tx.commit()"
        )
    )
    service.deliver("a")
    out, err = service.run("consume", "handlers:inbox", "--consumer", "stats", "--until-idle", "1", code=2)
    last = err.splitlines()[-1]
    assert "the handler handlers.count ended the transaction" in last
    assert "leave commit and rollback to outrider" in last
    assert "consumer broken" in err
    assert out == ""


def test_what_a_handler_failed_with_and_where_is_shown(service: Service) -> None:
    service.deliver("a", broken=True)
    _, log = service.run("consume", "handlers:inbox", "--consumer", "billing", "--until-idle", "0.5")
    where = "handlers.py:13 in bill"
    [dead_lettered] = [line for line in log.splitlines() if "consumer dead lettered" in line]
    for words in ('error="ValueError: no such price"', "kind=ValueError", f'where="{where}"', "dead_letter=1"):
        assert words in dead_lettered
    failure = json.loads(service.run("inbox", "show", "1", "--json")[0])["failure"]
    traceback = """Traceback (most recent call last):
  File "handlers.py", line 13, in bill
    raise ValueError("no such price")
ValueError: no such price"""
    assert failure == {
        "error": "ValueError: no such price",
        "kind": "ValueError",
        "where": where,
        "traceback": traceback,
    }
    shown = service.run("inbox", "show", "1")[0]
    assert where in shown
    assert traceback in shown


def test_a_chosen_consumer_runs_alone(service: Service) -> None:
    service.deliver("a")
    assert until_idle(service, "--consumer", "stats")["applied"] == 1
    assert (service.effects("stats"), service.effects("billing")) == (["a"], [])


def test_what_is_delivered_again_has_no_second_effect(service: Service) -> None:
    service.deliver("a", "b")
    until_idle(service)
    with closing(sqlite3.connect(service.directory / "log.db")) as log, log:
        log.execute('UPDATE consumer SET "offset" = 0')
    assert until_idle(service) == {**NOTHING, "duplicates": 4}
    assert len(service.effects("billing")) == len(service.effects("stats")) == 2


def test_an_event_that_its_handler_rejects_is_dead_lettered_and_blocks_its_key_only(service: Service) -> None:
    service.deliver("a", broken=True)
    service.deliver("a", "b")
    counts = until_idle(service, "--consumer", "billing")
    assert (counts["applied"], counts["waiting"], counts["dead_lettered"]) == (1, 1, 1)
    assert service.effects("billing") == ["b"]
    [dead] = json.loads(service.run("inbox", "list", "--json")[0])
    assert (dead["key"], dead["attempts"], "no such price" in dead["failure"]["error"]) == ("a", 2, True)
    service.run("inbox", "discard", str(dead["id"]), "--yes")
    assert until_idle(service, "--consumer", "billing")["applied"] == 1
    assert service.effects("billing") == ["b", "a"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_consumer_cleanly(service: Service, number: signal.Signals) -> None:
    service.deliver("a")
    with service.start("consume", "handlers:inbox", "--json") as process:
        give_up = time.monotonic() + WAIT_SECONDS
        while not service.effects("billing"):
            assert process.poll() is None
            assert time.monotonic() < give_up
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, err
    assert json.loads(out)["applied"] in (1, 2)
    # Everything handled is acked.
    assert until_idle(service, "--consumer", "billing")["duplicates"] == 0


def test_a_consumer_with_a_relay_is_a_whole_service_in_one_process(service: Service) -> None:
    module = service.directory / "handlers.py"
    staging = """
    outrider.stage_sync(tx, Event("order.billed", {}, topic="bills", key=event.key))


@inbox.handler("order.billed", consumer="ledger", topic="bills")
def enter(event: Event, tx: sqlite3.Connection) -> None:
    tx.execute("INSERT INTO effects (consumer, key) VALUES ('ledger', ?)", (event.key,))
"""
    billed = "VALUES ('billing', ?)\", (event.key,))"
    module.write_text("import outrider\n" + module.read_text().replace(billed, billed + staging))
    service.stage("a", "b")
    output, _ = service.run("consume", "handlers:inbox", "--relay", "--until-idle", "3", "--json")
    counts = json.loads(output)
    assert counts == {**NOTHING, "applied": 6, "published": 4}
    assert sorted(service.effects("ledger")) == ["a", "b"]
    assert service.relays() == 0
    assert "0 published" in service.run("consume", "handlers:inbox", "--relay", "--until-idle", "0.3")[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_relay_beside_a_consumer_stops_with_it_and_gives_its_lanes_back(
    service: Service, number: signal.Signals
) -> None:
    with service.start("consume", "handlers:inbox", "--relay", "--json") as process:
        service.stage("a")
        give_up = time.monotonic() + WAIT_SECONDS
        while not service.effects("billing"):
            assert process.poll() is None
            assert time.monotonic() < give_up
        assert service.relays() == 1
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, err
    assert json.loads(out)["published"] == 1
    assert service.relays() == 0


def test_a_fatal_error_of_the_relay_ends_the_consumer_with_the_exit_code_of_the_relay(service: Service) -> None:
    with closing(sqlite3.connect(service.path)) as conn:
        conn.execute("ALTER TABLE outbox_relay RENAME TO gone")
    with service.start("relay") as relay:
        _, alone = relay.communicate(timeout=WAIT_SECONDS)
    assert relay.returncode in (2, 3)
    with service.start("consume", "handlers:inbox", "--relay") as process:
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, err.splitlines()[-1], out) == (relay.returncode, alone.splitlines()[-1], "")


def test_a_relay_that_cannot_work_is_rejected_before_the_consumer_starts(service: Service) -> None:
    service.environment["OUTRIDER_TOPIC_RULE"] = "nowhere:rule"
    assert "there is no module nowhere here" in service.usage_error("handlers:inbox", "--relay")


def test_an_error_that_ends_the_consumer_lets_the_relay_give_its_lanes_back(service: Service) -> None:
    module = service.directory / "handlers.py"
    counted = "VALUES ('stats', ?)\", (event.key,))"
    module.write_text(module.read_text().replace(counted, f"{counted}\n    tx.commit()"))
    service.stage("a")
    _, err = service.run("consume", "handlers:inbox", "--relay", "--consumer", "stats", code=2)
    assert "the handler handlers.count ended the transaction" in err.splitlines()[-1]
    assert service.relays() == 0


def test_the_doctor_warns_of_receipts_that_go_before_the_log_does(service: Service) -> None:
    billing, stats = service.results()
    assert (billing["level"], stats["level"]) == ("warn", "ok")
    assert "billing keeps receipts for 3 days" in billing["text"]
    assert "orders is kept for 7 days" in billing["text"]
    assert "receipt_days=7" in billing["remedy"]
    assert stats["remedy"] == ""


def test_the_doctor_reports_nothing_about_consumers_that_are_not_named(service: Service) -> None:
    output = json.loads(service.run("doctor", "--json")[0])
    assert "receipts-shorter-than-retention" not in {found["check"] for found in output["results"]}


def test_the_doctor_rejects_an_object_that_is_no_inbox(service: Service) -> None:
    assert "did you mean handlers:inbox?" in service.run("doctor", "--consume", "handlers:inbx", code=2)[1]


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("config", "level", "words"),
    [
        ({"retention.ms": str(2 * 86_400_000)}, "ok", "orders is kept for 2 days"),
        ({"retention.ms": str(20 * 86_400_000)}, "warn", "orders is kept for 20 days"),
        ({"retention.ms": "-1"}, "warn", "orders is kept for ever"),
        ({"cleanup.policy": "compact"}, "warn", "orders is kept for ever"),
    ],
)
def test_the_doctor_asks_kafka_how_long_a_topic_is_kept(
    service: Service, kafka: str, config: dict[str, str], level: str, words: str
) -> None:
    topic = f"orders-{uuid4().hex[:12]}"
    create_topic(kafka, topic, config=config)
    service.write_module(topic)
    billing, _ = service.results("--broker", f"kafka://{kafka}")
    assert (billing["level"], words.replace("orders", topic) in billing["text"]) == (level, True)
    assert bool(billing["remedy"]) == (level == "warn")


@pytest.mark.kafka
def test_nothing_good_is_said_of_a_topic_that_is_missing(service: Service, kafka: str) -> None:
    service.write_module(f"missing-{uuid4().hex[:12]}")
    assert service.results("--broker", f"kafka://{kafka}", code=1) == []
