"""`outrider inbox` on a SQLite store: what it lists, what it does, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner

from outrider import Delivery, Event, Inbox
from outrider.app import open_inbox, open_schema
from outrider.cli import app, options
from outrider.inbox.executor import HandlerExecutor
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.retry import RetryPolicy
from outrider.telemetry.events import Observers
from outrider.wire import decode

ORDERS = "orders"
BILLING, STATS = "billing", "stats"


class Shell:
    """A store with an inbox, deliveries that come to it, and a person at the command line."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.url = f"sqlite:///{self.path}"
        self.handled: list[str] = []

    def __call__(self, *args: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["inbox", *args], env={"OUTRIDER_STORE": self.url})
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    def json(self, *args: str, code: int = 0) -> Any:
        result = self(*args, "--json", code=code)
        return json.loads(result.stdout if code == 0 else result.stderr)

    def receive(self, *deliveries: Delivery, consumer: str = BILLING, **options: Any) -> list[str]:
        """Let deliveries be handled, one after another; return what became of each."""

        async def run_once(inbox: Inbox) -> list[str]:
            inbox.consumer(consumer, **options)
            return [await inbox.process(delivery, self._handle, consumer=consumer) for delivery in deliveries]

        return asyncio.run(self._with_inbox(run_once))

    def fail(self, delivery: Delivery, handler: Callable[..., None]) -> None:
        """Let a consumer dead-letter a delivery after one attempt."""

        async def run_once(inbox: Inbox) -> list[str]:
            settings = ConsumerSettings(retry=RetryPolicy(max_attempts=1))
            routes = Routes(BILLING, settings, {(ORDERS, "order.placed"): Route(handler)})
            assert inbox.store is not None
            executor = HandlerExecutor(inbox.store, routes, Observers(), Random(0))
            results = [await executor.execute([decode(delivery)]) for _ in ("fails", "is dead-lettered")]
            return ["done" for result in results for _ in result.done]

        assert asyncio.run(self._with_inbox(run_once)) == ["done"]

    def actors(self) -> list[tuple[str, str]]:
        """Return what is on record: the verb, and who did it."""
        with closing(sqlite3.connect(self.path)) as conn:
            return conn.execute("SELECT verb, actor FROM outbox_operation ORDER BY id").fetchall()

    def _handle(self, event: Event, tx: sqlite3.Connection) -> None:
        self.handled.append(f"{event.key}{event.sequence or ''}")

    async def _with_inbox(self, work: Callable[[Inbox], Awaitable[list[str]]]) -> list[str]:
        store = await open_inbox(self.url)
        try:
            return await work(Inbox(store))
        finally:
            await store.close()


def delivery(number: int, key: str = "A", *, body: bytes = b"{}", sequence: int | None = None) -> Delivery:
    headers = {"message_id": str(UUID(int=number)).encode(), "event_type": b"order.placed"}
    if sequence is not None:
        headers |= {"sequence": str(sequence).encode(), "gapless": b"true"}
    return Delivery(ORDERS, key.encode(), body, headers)


def broken(number: int, key: str = "A") -> Delivery:
    return delivery(number, key, body=b"\xffno JSON")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_") and name != "OUTRIDER_ACTOR"]:
        monkeypatch.delenv(name)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    made = Shell(tmp_path)
    asyncio.run(open_schema(made.url).migrate())
    return made


@pytest.fixture
def blocked(shell: Shell) -> Shell:
    """Two dead letters block their streams, and one event waits behind the first."""
    assert shell.receive(broken(1, "A"), broken(2, "B"), delivery(3, "A")) == [
        "dead_lettered",
        "dead_lettered",
        "waiting",
    ]
    return shell


def test_an_inbox_without_dead_letters_lists_nothing(shell: Shell) -> None:
    assert shell.json("list") == shell.json("streams") == []
    assert "no dead letters match" in shell("list").stdout
    assert "no stream has held events" in shell("streams").stdout


def test_a_store_without_an_inbox_is_wrong_usage(tmp_path: Path) -> None:
    assert "outrider db migrate" in Shell(tmp_path).json("list", code=2)["error"]


def test_dead_letters_are_listed_oldest_first_and_without_their_bytes(blocked: Shell) -> None:
    rows = blocked.json("list")
    assert [(row["id"], row["key"], row["reason"]) for row in rows] == [
        (1, "A", "poison_message"),
        (2, "B", "poison_message"),
    ]
    assert not rows[0].keys() & {"headers", "body"}
    assert str(UUID(int=1)) in blocked("list").stdout


def test_dead_letters_are_filtered(blocked: Shell) -> None:
    blocked.receive(broken(9), consumer=STATS)
    assert [row["event_id"] for row in blocked.json("list", "--consumer", STATS)] == [str(UUID(int=9))]
    assert [row["id"] for row in blocked.json("list", "--key", "B")] == [2]
    assert [row["id"] for row in blocked.json("list", "--topic", ORDERS, "--limit", "1")] == [1]
    assert blocked.json("list", "--topic", "parcels") == blocked.json("list", "--reason", "by_hand") == []
    assert "did you mean poison_message?" in blocked.json("list", "--reason", "poison_mesage", code=2)["error"]


def test_one_dead_letter_is_shown_with_its_bytes_if_asked(blocked: Shell) -> None:
    output = blocked.json("show", "1")
    assert (output["consumer"], output["failure"]["error"]) == (BILLING, "body: not JSON (UnicodeDecodeError)")
    assert not output.keys() & {"headers", "body"}
    whole = blocked.json("show", "1", "--body")
    assert whole["headers"]["event_type"] == "order.placed"
    assert whole["body"] == "base64:/25vIEpTT04="
    assert "base64:/25vIEpTT04=" in blocked("show", "1", "--body").stdout
    assert "no JSON" not in blocked("show", "1").stdout


def test_a_body_that_is_text_is_shown_as_text(shell: Shell) -> None:
    shell.receive(delivery(1, body=b"{no JSON"))
    assert shell.json("show", "1", "--body")["body"] == "{no JSON"


def test_the_traceback_of_a_failed_handler_is_shown_and_a_list_leaves_it_out(shell: Shell) -> None:
    def bill(event: Event, tx: sqlite3.Connection) -> None:
        raise LookupError("no customer: amqp://shop:s3cret@mq")

    shell.fail(delivery(1), bill)
    output = shell("show", "1").stdout
    assert "Traceback (most recent call last):\n" in output
    assert ", in bill\n" in output
    assert "\nLookupError: no customer: amqp://shop:***@mq\n" in output
    assert shell.json("show", "1")["failure"]["traceback"] in output
    [row] = shell.json("list")
    assert row["failure"].keys() == {"error", "kind", "where"}


@pytest.mark.parametrize("args", [("show", "7"), ("replay", "7"), ("discard", "7", "--yes")])
def test_an_id_that_is_not_there_is_a_finding(blocked: Shell, args: tuple[str, ...]) -> None:
    error = blocked.json(*args, code=1)["error"]
    assert "7" in error
    assert "outrider inbox list" in error
    assert len(blocked.json("list")) == 2


def test_what_is_no_id_is_wrong_usage(blocked: Shell) -> None:
    for text in ("x", "0", str(2**63)):
        assert blocked.json("show", text, code=2)["exit"] == 2


def test_streams_that_wait_are_listed(blocked: Shell) -> None:
    first, second = blocked.json("streams")
    assert (first["key"], first["band"], first["cause"], first["waiting"]) == ("A", "normal", "dead_letter", 1)
    assert (second["key"], second["waiting"]) == ("B", 0)
    assert blocked.json("streams", "--consumer", STATS) == []
    assert len(blocked.json("streams", "--limit", "1")) == 1
    assert "dead_letter" in blocked("streams").stdout


def test_a_replayed_dead_letter_comes_before_what_waited_for_it(shell: Shell) -> None:
    shell.receive(broken(1), delivery(2))
    assert shell.json("replay", "1") == {"replayed": 1}
    assert shell.json("list") == []
    [stream] = shell.json("streams")
    assert (stream["cause"], stream["waiting"]) == ("draining", 2)
    [(verb, who)] = shell.actors()
    assert (verb, who.startswith("cli:")) == ("inbox_replay", True)
    # It still fails, so it is dead-lettered again, and the others go on waiting.
    assert shell.receive(delivery(3)) == ["waiting"]
    assert [row["event_id"] for row in shell.json("list")] == [str(UUID(int=1))]
    assert (shell.json("streams")[0]["waiting"], shell.handled) == (2, [])


def test_known_dead_letters_are_replayed_and_missing_ones_are_reported(blocked: Shell) -> None:
    result = blocked("replay", "2", "7", "--json", code=1)
    assert json.loads(result.stdout) == {"replayed": 1}
    assert "no dead letter 7" in json.loads(result.stderr)["error"]
    assert [row["id"] for row in blocked.json("list")] == [1]


def test_replaying_by_id_asks_nothing_and_by_filter_needs_a_yes(blocked: Shell) -> None:
    assert "--yes" in blocked.json("replay", "--consumer", BILLING, code=2)["error"]
    assert "replay 2 dead letters" in blocked.json("replay", "--all", code=2)["error"]
    assert len(blocked.json("list")) == 2
    assert "1 dead letter will be handled by the next running consumer" in blocked("replay", "1").stdout
    assert blocked.json("replay", "--consumer", BILLING, "--yes") == {"replayed": 1}


def test_discarding_always_needs_a_yes(blocked: Shell) -> None:
    assert "discard 1 dead letter," in blocked.json("discard", "1", code=2)["error"]
    assert "there is no terminal to ask" in blocked("discard", "1", code=2).stderr
    assert len(blocked.json("list")) == 2
    assert blocked.json("discard", "1", "--yes") == {"discarded": 1}
    [(verb, who)] = blocked.actors()
    assert (verb, who.startswith("cli:")) == ("inbox_discard", True)


def test_what_waited_behind_a_discarded_one_goes_on(blocked: Shell) -> None:
    blocked("discard", "1", "2", "--yes")
    [stream] = blocked.json("streams")
    assert (stream["key"], stream["cause"], stream["waiting"]) == ("A", "draining", 1)


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_dead_letters_are_chosen_in_one_way_only(blocked: Shell, verb: str) -> None:
    for choice in ((), ("1", "--all"), ("1", "--key", "A"), ("--all", "--topic", ORDERS)):
        assert f"say which dead letters to {verb}, in one way" in blocked.json(verb, *choice, "--yes", code=2)["error"]
    assert len(blocked.json("list")) == 2


@pytest.mark.parametrize(("verb", "done"), [("replay", "replayed"), ("discard", "discarded")])
def test_a_filter_that_matches_nothing_does_nothing(blocked: Shell, verb: str, done: str) -> None:
    assert blocked.json(verb, "--topic", "parcels") == {done: 0}


def test_a_command_that_took_as_many_as_it_may_says_that_more_may_be_left(
    blocked: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "CHOSEN_MAX", 1)
    result = blocked("discard", "--all", "--yes", code=1)
    assert "1 dead letter discarded" in result.stdout
    assert "run the command again" in result.stderr


@pytest.fixture
def early(shell: Shell) -> Shell:
    """Number 1 was handled, 2 is missing, and 3 waits for it."""
    numbered = [delivery(1, sequence=1), delivery(3, sequence=3)]
    assert shell.receive(*numbered, ordering="strict") == ["applied", "waiting"]
    return shell


PLACE = ("--consumer", BILLING, "--topic", ORDERS, "--key", "A")


def test_a_stream_without_its_gap_goes_on_with_the_first_event_that_waits(early: Shell) -> None:
    [stream] = early.json("streams")
    assert (stream["cause"], stream["seen"], stream["waiting"]) == ("early", 1, 1)
    assert early.json("skip-gap", *PLACE, "--yes") == {"skipped_gap": "A"}
    assert early.json("streams")[0]["cause"] == "draining"
    # The next delivery lets go of what waited before it, by itself.
    early.receive(delivery(4, sequence=4), ordering="strict")
    assert early.handled == ["A1", "A3", "A4"]
    assert early.json("streams") == []
    assert early.actors()[0][0] == "inbox_skip_gap"


def test_skipping_a_gap_needs_a_yes(early: Shell) -> None:
    assert "give up on the missing events of A on orders" in early.json("skip-gap", *PLACE, code=2)["error"]
    assert early.json("streams")[0]["cause"] == "early"
    assert "A on orders continues" in early("skip-gap", *PLACE, "--yes").stdout


def test_a_stream_that_does_not_wait_for_a_predecessor_has_no_gap_to_skip(blocked: Shell) -> None:
    assert "outrider inbox streams" in blocked.json("skip-gap", *PLACE, "--yes", code=1)["error"]
    assert blocked.json("streams")[0]["cause"] == "dead_letter"


def test_a_band_that_is_none_is_wrong_usage(early: Shell) -> None:
    assert "high, normal, low" in early.json("skip-gap", *PLACE, "--band", "urgent", "--yes", code=2)["error"]
    early("skip-gap", *PLACE, "--band", "high", "--yes", code=1)
