"""`outrider keys`, and commands that show payloads, on a SQLite file and a ring in a file."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest

from outrider import Delivery, Event
from outrider.app import Outbox, open_inbox, stored_subject_keys
from outrider.cli.imports import find_payloads
from outrider.errors import KeysUnavailable
from outrider.event import DeadLetterReason, OnDeadLetter
from outrider.inbox.model import EventOutcome, InboxDeadLettered
from outrider.privacy import DataKey, KeyRing
from outrider.stores.sqlite import privacy as sqlite_privacy
from outrider.wire import decode
from tests.support.key_rings import ListedKeys
from tests.unit.cli.test_commands import Shell, bare, shell

__all__ = ["bare", "shell"]

MODULE = """
from outrider.app import stored_keys, stored_subject_keys
from outrider.payload import Payloads
from outrider.privacy import FieldEncryption, KeyRing

SENSITIVE = {"order.placed": ["customer.email"]}
payloads = Payloads(encryption=FieldEncryption(keys=KeyRing.from_file(FILE), sensitive=SENSITIVE))
fixed = Payloads(encryption=FieldEncryption(keys=KeyRing.from_environment("SHOP_KEYS"), sensitive=SENSITIVE))
plain = Payloads()
master = KeyRing.from_environment("SHOP_MASTER")
stored = Payloads(encryption=FieldEncryption(keys=stored_keys(STORE, master=master), sensitive=SENSITIVE))
subjects = stored_subject_keys(APART, master=master)
personal = Payloads(encryption=FieldEncryption(keys=KeyRing.from_file(FILE), sensitive=SENSITIVE, subjects=subjects))
"""
NAME = "shop_keys:payloads"
PLAIN = {"customer": {"email": "ann@example.com"}}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MODULE.replace("FILE", repr(str(tmp_path / "ring"))).replace("STORE", repr(f"sqlite:///{tmp_path}/store.db"))
    text = text.replace("APART", repr(f"sqlite:///{tmp_path}/keys.db"))
    (tmp_path / "shop_keys.py").write_text(text)
    monkeypatch.delenv("SHOP_MASTER", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_keys", raising=False)


@pytest.fixture
def named(shell: Shell) -> Shell:
    shell.environment["OUTRIDER_PAYLOADS"] = NAME
    return shell


def stage(shell: Shell, payload: Any = PLAIN, name: str = NAME, subject: str | None = None) -> str:
    outbox = Outbox(payloads=find_payloads(name))
    with closing(sqlite3.connect(shell.path, isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        [event_id] = outbox.stage_sync(conn, Event("order.placed", payload, topic="orders", key="A", subject=subject))
        conn.execute("COMMIT")
    return str(event_id)


def test_keys_are_made_added_rotated_and_listed(named: Shell) -> None:
    assert named.json("keys", "list") == []
    named("keys", "add", "one")
    added = named.json("keys", "add")["added"]
    assert "already" in named("keys", "add", "one", code=1).stderr
    assert [(row["id"], row["active"]) for row in named.json("keys", "list")] == [("one", True), (added, False)]
    assert named.json("keys", "rotate", added) == {"active": added}
    latest = named.json("keys", "rotate")["active"]
    assert [(row["id"], row["active"]) for row in named.json("keys", "ls")] == [
        (latest, True),
        (added, False),
        ("one", False),
    ]
    assert "has no key absent" in named("keys", "rotate", "absent", code=1).stderr


def test_a_new_key_is_printed_once_and_kept_nowhere(named: Shell) -> None:
    entry = named.json("keys", "new", "spring")
    assert entry["entry"].startswith("spring:")
    assert named("keys", "new", "spring").stdout.strip() != entry["entry"]
    assert named.json("keys", "list") == []
    shown = named("keys", "list", "--payloads", "shop_keys:fixed", SHOP_KEYS=entry["entry"]).stdout
    assert "spring" in shown
    assert entry["entry"].partition(":")[2] not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--payloads", "shop_keys:plain"), "encrypts no fields"),
        (("--payloads", "shop_keys:fixed"), "cannot be changed from here"),
        ((), "no payloads are named"),
    ],
)
def test_a_ring_that_cannot_be_changed_says_so(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    assert said in shell("keys", "add", *arguments, code=2).stderr


def test_a_payload_is_shown_decrypted_to_who_has_the_keys(named: Shell, tmp_path: Path) -> None:
    named("keys", "add", "one")
    event_id = stage(named)
    assert named.json("events", "show", event_id, "--payload")["payload"] == PLAIN
    assert "payload" not in named.json("events", "show", event_id)
    without = named("events", "show", event_id, "--payload", OUTRIDER_PAYLOADS="")
    assert "ann@" not in without.stdout
    assert '"key": "one"' in without.stdout
    named("dead-letters", "add", event_id)
    assert named.json("dead-letters", "show", event_id, "--payload")["payload"] == PLAIN
    (tmp_path / "ring").unlink()
    sys.modules.pop("shop_keys")
    lost = named("dead-letters", "show", event_id, "--payload")
    assert "is encrypted with the key one, which the file" in lost.stderr
    assert "ann@" not in lost.stdout


def test_an_edited_dead_letter_is_encrypted_again(named: Shell, tmp_path: Path) -> None:
    named("keys", "add", "one")
    event_id, edited = stage(named), tmp_path / "edited.json"
    named("dead-letters", "add", event_id)
    edited.write_text('{"customer": {"email": "bob@example.com"}}')
    named("dead-letters", "edit", event_id, "--payload-file", str(edited))
    with closing(sqlite3.connect(named.path)) as conn:
        [(stored,)] = conn.execute("SELECT payload FROM outbox_dead_letter").fetchall()
    assert "bob@" not in stored
    assert named.json("dead-letters", "show", event_id, "--payload")["payload"] == json.loads(edited.read_text())


def test_the_body_of_a_consumers_dead_letter_is_shown_decrypted(named: Shell) -> None:
    named("keys", "add", "one")
    event_id = stage(named)
    with closing(sqlite3.connect(named.path)) as conn:
        [(stored,)] = conn.execute("SELECT payload FROM outbox").fetchall()
    asyncio.run(_dead_letter(named, event_id, stored.encode()))
    [row] = named.json("inbox", "list")
    assert json.loads(named.json("inbox", "show", str(row["id"]), "--body")["body"]) == PLAIN
    without = named("inbox", "show", str(row["id"]), "--body", OUTRIDER_PAYLOADS="")
    assert "ann@" not in without.stdout


async def _dead_letter(shell: Shell, event_id: str, body: bytes) -> None:
    inbox = await open_inbox(shell.environment["OUTRIDER_STORE"])
    headers = {"message_id": event_id.encode(), "event_type": b"order.placed", "key": b"A"}
    received = decode(Delivery("orders", b"A", body, headers))
    assert received.event_id == UUID(event_id)
    letter = InboxDeadLettered(DeadLetterReason.MAX_RETRIES_EXCEEDED, {"error": ""}, OnDeadLetter.SKIP, 1)
    async with inbox.transaction() as tx:
        await inbox.record_receipts(tx, "billing", [received], ordered=False)
        await inbox.record_outcomes(tx, "billing", [EventOutcome(received, letter)], {})
    await inbox.close()


def key_ids(shell: Shell) -> list[str]:
    """Return the keys of the values in the outbox, in order."""
    with closing(sqlite3.connect(shell.path)) as conn:
        rows = conn.execute("SELECT payload FROM outbox ORDER BY id").fetchall()
    return [json.loads(text)["customer"]["email"]["key"] for (text,) in rows]


def test_stored_payloads_are_encrypted_again_after_a_rotation(named: Shell) -> None:
    named("keys", "add", "one")
    ids = [stage(named), stage(named)]
    named("keys", "add", "two")
    named("keys", "rotate", "two")
    counted = named.json("keys", "reencrypt", "--dry-run")
    assert (counted["to_write"]["event"], counted["complete"]) == (2, False)
    assert key_ids(named) == ["one", "one"]
    done = named.json("keys", "reencrypt")
    assert (done["written"]["event"], done["examined"]["event"], done["complete"]) == (2, 2, True)
    assert key_ids(named) == ["two", "two"]
    assert "archived event" in named("keys", "reencrypt").stdout
    assert named.json("events", "show", ids[0], "--payload")["payload"] == PLAIN


def test_a_payload_that_does_not_open_is_named_and_the_others_are_encrypted_again(named: Shell, tmp_path: Path) -> None:
    named("keys", "add", "one")
    lost = stage(named)
    (tmp_path / "ring").unlink()
    named("keys", "add", "two")
    stage(named)
    named("keys", "rotate")
    failed = named.json("keys", "reencrypt", code=1)
    assert [(row["event_id"], row["kind"]) for row in failed["would_not_open"]] == [(lost, "event")]
    assert "the key one, which the file" in failed["would_not_open"][0]["problem"]
    assert failed["written"]["event"] == 1
    assert "1 payloads do not open" in named("keys", "reencrypt", code=1).stdout


def test_keys_in_the_store_are_wrapped_with_a_master_key(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.environment["OUTRIDER_PAYLOADS"] = "shop_keys:stored"
    assert "has no master key" in shell("keys", "add", "one", code=2).stderr
    first, second = (shell.json("keys", "new", name)["entry"] for name in ("m1", "m2"))
    monkeypatch.setenv("SHOP_MASTER", first)
    sys.modules.pop("shop_keys")
    shell("keys", "add", "one")
    event_id = stage(shell, name="shop_keys:stored")
    rotated = shell.json("keys", "rotate")["active"]
    listed = shell.json("keys", "list")
    assert [(row["id"], row["active"], row["master"]) for row in listed] == [
        (rotated, True, "m1"),
        ("one", False, "m1"),
    ]
    assert shell.json("keys", "reencrypt")["written"]["event"] == 1
    assert key_ids(shell) == [rotated]
    monkeypatch.setenv("SHOP_MASTER", f"{second} {first}")
    sys.modules.pop("shop_keys")
    assert shell.json("keys", "rewrap", "--as", "ann") == {"rewrapped": 2}
    lines = shell.json("audit", "list", "--operations")[::-1]
    verbs = ["key_add", "key_add", "key_rotate", "keys_reencrypt", "key_rewrap", "key_rewrap"]
    assert [line["verb"] for line in lines] == verbs
    assert {line["detail"]["key"] for line in lines} == {"one", rotated}
    assert [line["actor"] for line in lines[-2:]] == ["ann", "ann"]
    monkeypatch.setenv("SHOP_MASTER", second)
    sys.modules.pop("shop_keys")
    assert shell.json("events", "show", event_id, "--payload")["payload"] == PLAIN
    assert "only keys in a store are wrapped" in shell("keys", "rewrap", "--payloads", NAME, code=2).stderr


def test_a_relay_without_the_master_key_publishes_encrypted_events(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.environment["OUTRIDER_PAYLOADS"] = "shop_keys:stored"
    monkeypatch.setenv("SHOP_MASTER", shell.json("keys", "new")["entry"])
    shell("keys", "add", "one")
    stage(shell, name="shop_keys:stored")
    monkeypatch.delenv("SHOP_MASTER")
    sys.modules.pop("shop_keys")
    shell("relay", "--until-empty")
    assert key_ids(shell) == []
    assert shell.json("dead-letters", "list") == []


PERSONAL = "shop_keys:personal"


@pytest.fixture
def personal(shell: Shell, installed_sqlite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A shell whose payloads have keys for subjects, in a file of their own, and a ring with one key."""
    shutil.copy(installed_sqlite, tmp_path / "keys.db")
    shell.environment["OUTRIDER_PAYLOADS"] = PERSONAL
    monkeypatch.setenv("SHOP_MASTER", shell.json("keys", "new", "m1")["entry"])
    shell("keys", "add", "one")
    sys.modules.pop("shop_keys")
    return shell


def destroy(subject: str) -> None:
    sys.modules.pop("shop_keys")
    encryption = cast("Any", find_payloads(PERSONAL)).encryption
    assert len(asyncio.run(encryption.subjects.destroy(subject))) == 1
    encryption.subjects.close()


def test_keys_of_subjects_are_counted_and_wrapped_again(personal: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    event_id = stage(personal, name=PERSONAL, subject="customer:1")
    stage(personal, name=PERSONAL, subject="customer:2")
    assert personal.json("keys", "subjects") == {"live": 2, "destroyed": 0}
    destroy("customer:2")
    assert personal.json("keys", "subjects") == {"live": 1, "destroyed": 1}
    assert "1 subjects have keys of their own; 1 keys of subjects were destroyed" in personal("keys", "list").stdout
    assert [row["id"] for row in personal.json("keys", "list")] == ["one"]
    second = personal.json("keys", "new", "m2")["entry"]
    monkeypatch.setenv("SHOP_MASTER", f"{second} {os.environ['SHOP_MASTER']}")
    sys.modules.pop("shop_keys")
    assert personal.json("keys", "rewrap") == {"rewrapped_subjects": 1}
    assert "0 keys have a new master key" in personal("keys", "rewrap").stdout
    monkeypatch.setenv("SHOP_MASTER", second)
    sys.modules.pop("shop_keys")
    assert personal.json("events", "show", event_id, "--payload")["payload"] == PLAIN
    assert "subjects have no keys of their own" in personal("keys", "subjects", "--payloads", NAME, code=2).stderr


def test_payloads_of_an_erased_subject_are_called_erased_and_nothing_fails(personal: Shell) -> None:
    event_id = stage(personal, name=PERSONAL, subject="customer:1")
    stage(personal, name=PERSONAL, subject="customer:2")
    with closing(sqlite3.connect(personal.path)) as conn:
        [(stored,)] = conn.execute("SELECT payload FROM outbox WHERE event_id = ?", [event_id]).fetchall()
    asyncio.run(_dead_letter(personal, event_id, stored.encode()))
    destroy("customer:1")
    [row] = personal.json("inbox", "list")
    for command in (("events", "show", event_id, "--payload"), ("inbox", "show", str(row["id"]), "--body")):
        shown = personal(*command)
        assert "erased: payload.customer.email: its subject was erased: the key s-" in shown.stderr
        assert "$encrypted" in shown.stdout
    checked = personal.json("schema", "check")
    assert (checked["checked"]["event"], checked["count"], checked["erased"]) == (2, 0, 2)
    assert "2 belong to subjects that were erased" in personal("schema", "check").stdout
    done = personal.json("keys", "reencrypt")
    assert (done["written"]["event"], done["count"], done["erased"], done["complete"]) == (0, 0, 1, True)
    assert "1 payloads belong to subjects that were erased" in personal("keys", "reencrypt").stdout


def test_stored_payloads_move_from_the_ring_to_the_key_of_their_subject(personal: Shell) -> None:
    personal.environment["OUTRIDER_PAYLOADS"] = NAME
    event_id = stage(personal, subject="customer:1")
    stage(personal)
    assert key_ids(personal) == ["one", "one"]
    personal.environment["OUTRIDER_PAYLOADS"] = PERSONAL
    assert personal.json("keys", "reencrypt", "--dry-run")["to_write"]["event"] == 1
    assert personal.json("keys", "subjects") == {"live": 0, "destroyed": 0}
    assert personal.json("keys", "reencrypt")["written"]["event"] == 1
    moved, kept = key_ids(personal)
    assert (moved[:2], kept) == ("s-", "one")
    assert personal.json("keys", "subjects") == {"live": 1, "destroyed": 0}
    assert personal.json("events", "show", event_id, "--payload")["payload"] == PLAIN


def test_a_key_in_the_file_that_the_caller_writes_is_refused_with_the_remedy(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_privacy, "BUSY_SECONDS", 0.05)
    subjects = stored_subject_keys(shell.environment["OUTRIDER_STORE"], master=KeyRing(ListedKeys(DataKey.new("m1"))))
    with closing(sqlite3.connect(shell.path, isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        with pytest.raises(KeysUnavailable, match="keep the keys of subjects in a file of their own"):
            subjects.key_of("customer:1")
    subjects.close()
