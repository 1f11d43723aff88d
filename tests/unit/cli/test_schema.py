"""`outrider schema`: registered schemas, and the check of stored documents against new code, on a SQLite file."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

import outrider
from outrider import Event, InvalidEvent
from outrider.app import Outbox, open_inbox, open_sagas, stored_schemas
from outrider.cli import schema_check
from outrider.errors import SchemaUnavailable
from outrider.event import DeadLetterReason, OnDeadLetter
from outrider.inbox.model import EventOutcome, Held, InboxDeadLettered
from outrider.payload import PayloadFacts, Payloads
from outrider.payload.store import StoredSchemas
from outrider.saga.model import Phase
from outrider.testing.fakes import RecordingObserver
from outrider.testing.saga_harness import new_saga, reply
from outrider.wire import decode
from tests.unit.cli.test_commands import Shell, bare, shell

__all__ = ["bare", "shell"]

MODULE = """
from dataclasses import dataclass

from outrider.payload import Payloads, Upcaster
from outrider.saga import Saga, SagaRegistry

@dataclass
class OrderPlaced:
    total: int

def broken(payload):
    return payload["absent"]

@dataclass
class Order:
    amount: int
    currency: str = "EUR"

order = Saga("order", Order)
order.wait("stock.reserved", timeout_seconds=60)
sagas = SagaRegistry(order)

@dataclass
class Other:
    currency: str

other = Saga("order", Other)
other.wait("stock.reserved", timeout_seconds=60)
changed = SagaRegistry(other)

TYPES = ("order.placed", "stock.reserved", "stock.refused", "parcel.sent")
good = Payloads(upcasters=[Upcaster(name, 1, 2, lambda payload: {**payload, "new": 1}) for name in TYPES])
bad = Payloads(upcasters=[Upcaster(name, 1, 2, broken) for name in TYPES])
narrow = Payloads({"order.placed": {1: {"required": ["currency"]}}})
"""
KINDS = [
    *("event", "dead letter", "held event", "consumer dead letter", "saga message", "participant reply"),
]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_schema.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_schema", raising=False)


def stored(shell: Shell) -> dict[str, str]:
    """Store one document of every kind; return their ids."""
    with closing(sqlite3.connect(shell.path, isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        event, dead = outrider.stage_sync(conn, *(Event("order.placed", {"total": n}, key=str(n)) for n in range(2)))
        outbox = Outbox()
        outbox.perform_sync(conn, "participant_enter", "stock", "K", Phase.ACTION)
        body = {"event_type": "stock.refused", "payload": {}, "schema_version": 1}
        answer = json.dumps({"rejection": True, "reply": body}).encode()
        outbox.perform_sync(conn, "participant_save_reply", "stock", "K", Phase.ACTION, answer)
        conn.execute("COMMIT")
    shell("dead-letters", "add", str(dead), "--reason-text", "by hand")
    saga_id, ids = asyncio.run(_stored_at_the_other_end(shell))
    return dict(zip(KINDS, [str(event), str(dead), *ids, "stock K action"], strict=True)) | {"saga state": str(saga_id)}


async def _stored_at_the_other_end(shell: Shell) -> tuple[UUID, list[str]]:
    url = shell.environment["OUTRIDER_STORE"]
    inbox, sagas = await open_inbox(url), await open_sagas(url)
    received = [decode(outrider.Delivery("parcels", None, b"{}", headers(n))) for n in range(2)]
    letter = InboxDeadLettered(DeadLetterReason.MAX_RETRIES_EXCEEDED, {"error": ""}, OnDeadLetter.SKIP, 1)
    async with inbox.transaction() as tx:
        await inbox.record_receipts(tx, "shipping", received, ordered=False)
        outcomes = [EventOutcome(received[0], Held()), EventOutcome(received[1], letter)]
        await inbox.record_outcomes(tx, "shipping", outcomes, {})
    saga = new_saga("A-7")
    async with sagas.transaction() as tx:
        await sagas.start(tx, saga)
        mail = reply(saga.saga_id)
        await sagas.deliver(tx, [mail])
    await inbox.close()
    await sagas.close()
    message = f"{saga.saga_id} {mail.event_id}"
    return saga.saga_id, [*(str(each.event_id) for each in received), message]


def headers(n: int) -> dict[str, bytes]:
    return {"message_id": str(uuid4()).encode(), "event_type": b"parcel.sent", "key": str(n).encode()}


def test_a_schema_is_registered_from_a_file_or_a_model_listed_and_shown(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"required": ["total"]}')
    shell("schema", "register", "order.placed", "1", str(file))
    shell("schema", "register", "order.placed", "2.0.0", "shop_schema:OrderPlaced")
    assert "is registered" in shell("schema", "register", "order.placed", "1", str(file)).stdout
    listed = shell.json("schema", "list")
    assert [(row["event_type"], row["version"]) for row in listed] == [("order.placed", 1), ("order.placed", "2.0.0")]
    assert json.loads(shell("schema", "show", "order.placed", "1").stdout) == {"required": ["total"]}
    file.write_text("{}")
    assert "has another schema already" in shell("schema", "register", "order.placed", "1", str(file), code=1).stderr
    shell("schema", "register", "order.placed", "1", str(file), "--replace")
    assert json.loads(shell("schema", "show", "order.placed", "1").stdout) == {}
    assert "is not registered" in shell("schema", "show", "order.placed", "7", code=1).stderr


@pytest.mark.parametrize(
    ("version", "source", "said"),
    [
        ("one", "shop_schema:OrderPlaced", "'one' is no version"),
        ("1", "absent.json", "cannot read absent.json"),
        ("1", "shop_schema:good", "is no type"),
        ("1", "shop_schema", "names no type"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(shell: Shell, version: str, source: str, said: str) -> None:
    assert said in shell("schema", "register", "order.placed", version, source, code=2).stderr


def test_staging_takes_the_schemas_of_the_store_and_keeps_them_while_it_is_away(shell: Shell, tmp_path: Path) -> None:
    shell("schema", "register", "order.placed", "1", "shop_schema:OrderPlaced")
    source = stored_schemas(shell.environment["OUTRIDER_STORE"])
    source.refresh_seconds = 0.0
    payloads = Payloads(source, observer=RecordingObserver())
    assert (source.event_types(), source.versions("order.placed")) == (["order.placed"], [1])
    with closing(sqlite3.connect(shell.path, isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        with pytest.raises(InvalidEvent, match=r"payload\.total"):
            Outbox(payloads=payloads).stage_sync(conn, Event("order.placed", {"total": "1"}))
    shell.path.rename(tmp_path / "away.db")
    with pytest.raises(InvalidEvent, match=r"payload\.total"):
        payloads.stage(PayloadFacts(None, "order.placed", 1, "orders", None), '{"total": "1"}')


def test_a_database_that_does_not_answer_is_a_source_that_is_unavailable() -> None:
    async def opening() -> Any:
        raise outrider.Transient("the server is away")

    with pytest.raises(SchemaUnavailable, match=r"schemas in the store cannot be read \(the server is away\)"):
        StoredSchemas(opening, "the store").find("order.placed", 1)


def test_the_check_passes_if_new_code_opens_everything(shell: Shell) -> None:
    stored(shell)
    done = shell.json("schema", "check", "--payloads", "shop_schema:good", "--sagas", "shop_schema:sagas")
    assert done == {
        "checked": dict.fromkeys(sorted([*KINDS, "saga state"]), 1),
        "would_not_open": [],
        "count": 0,
        "unchecked": 0,
        "erased": 0,
    }
    assert "everything opens" in shell("schema", "check", OUTRIDER_PAYLOADS="shop_schema:good").stdout


def test_the_check_lists_every_kind_of_document_that_would_not_open(shell: Shell) -> None:
    ids = stored(shell)
    before = shell.path.read_bytes()
    options = ("--payloads", "shop_schema:bad", "--sagas", "shop_schema:changed")
    done = shell.json("schema", "check", *options, code=1)
    assert {row["kind"]: row["id"] for row in done["would_not_open"]} == ids
    assert "raised KeyError" in done["would_not_open"][0]["problem"]
    said = shell("schema", "check", *options, code=1).stdout
    assert f"{len(ids)} would not open with the new code" in said
    assert all(document_id in said for document_id in ids.values())
    assert shell.path.read_bytes() == before


def test_the_check_finds_events_that_a_changed_schema_would_dead_letter(shell: Shell) -> None:
    ids = stored(shell)
    done = shell.json("schema", "check", "--payloads", "shop_schema:narrow", code=1)
    [row] = done["would_not_open"]
    assert (row["kind"], row["id"]) == ("event", ids["event"])
    assert row["problem"] == "payload.currency: it is required"
    assert done["unchecked"] == 1


def test_the_check_reads_every_page(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_check, "PAGE", 2)
    shell.stage(*"ABCDEFG")
    assert shell.json("schema", "check")["checked"] == {"event": 7}
    assert shell.json("schema", "check", "--payloads", "shop_schema:bad", code=1)["count"] == 7
