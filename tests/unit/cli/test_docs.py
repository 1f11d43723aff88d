"""`outrider docs asyncapi`: the document of a service, from its types, handlers and sagas."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.test_commands import Shell, bare

__all__ = ["bare"]

MODULE = """
from dataclasses import dataclass

from outrider import Inbox
from outrider.payload import Payloads
from outrider.saga import Saga

@dataclass
class Order:
    order_id: str

payloads = Payloads({
    "order.placed": {1: Order, "2.0.0": {"required": ["order_id"]}},
    "stock.reserved": {1: {"type": "object"}},
    "invoice.sent": {1: {"type": "object"}},
})
inbox = Inbox()

@inbox.handler("order.placed", "unknown.type", consumer="billing", topic="orders")
async def bill(event, tx): ...

order = Saga("order", Order)
reserve = order.request(
    "stock.reserve", topic="stock", reply="stock.reserved", rejection="stock.refused",
    compensate="stock.release", compensated="stock.released",
)
order.wait("parcel.collected")
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_docs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_docs", raising=False)


ALL = ("--payloads", "shop_docs:payloads", "--inbox", "shop_docs:inbox", "--sagas", "shop_docs:order")


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*([value["$ref"]] if isinstance(value.get("$ref"), str) else []), *references(list(value.values()))]
    return [found for each in value for found in references(each)] if isinstance(value, list) else []


def resolved(document: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        document = document[part.replace("~1", "/").replace("~0", "~")]
    return document


def test_every_reference_of_the_document_leads_somewhere(bare: Shell) -> None:
    document = json.loads(bare("docs", "asyncapi", *ALL, "--title", "Shop").stdout)
    assert (document["asyncapi"], document["info"]) == ("3.0.0", {"title": "Shop", "version": "1.0.0"})
    found = references(document)
    assert len(found) > 20
    assert all(resolved(document, reference) for reference in found)


def test_handlers_receive_sagas_send_commands_and_other_registered_types_are_sent(bare: Shell) -> None:
    document = json.loads(bare("docs", "asyncapi", *ALL).stdout)
    operations = {
        name: (each["action"], each["channel"]["$ref"], [m["$ref"].rpartition("/")[2] for m in each["messages"]])
        for name, each in document["operations"].items()
    }
    assert operations["billing.order.placed"] == (
        "receive",
        "#/channels/orders",
        ["order.placed.1", "order.placed.2.0.0"],
    )
    assert operations["billing.unknown.type"] == ("receive", "#/channels/orders", ["unknown.type"])
    assert operations["invoice.sent"] == ("send", "#/channels/events.invoice.sent", ["invoice.sent.1"])
    sent = {name: each for name, each in operations.items() if name.startswith("order.") and each[0] == "send"}
    assert [each[2] for each in sent.values()] == [["stock.reserve"], ["stock.release"]]
    command = document["operations"][next(iter(sent))]
    assert [m["$ref"].rpartition("/")[2] for m in command["reply"]["messages"]] == ["stock.reserved.1"]
    received = {each[2][0] for name, each in operations.items() if name.startswith("order.") and each[0] == "receive"}
    assert received == {"stock.reserved.1", "stock.refused", "stock.released", "parcel.collected"}
    payload = document["components"]["messages"]["order.placed.1"]["payload"]
    assert payload["schema"]["required"] == ["order_id"]


def test_the_document_is_written_to_a_file(bare: Shell, tmp_path: Path) -> None:
    file = tmp_path / "asyncapi.json"
    bare("docs", "asyncapi", "--inbox", "shop_docs:inbox", "--output", str(file))
    assert set(json.loads(file.read_text())["channels"]) == {"orders"}
    missing = tmp_path / "absent" / "asyncapi.json"
    assert "cannot write" in bare("docs", "asyncapi", *ALL, "-o", str(missing), code=2).stderr


def test_a_service_without_anything_is_a_usage_error(bare: Shell) -> None:
    assert "nothing to document" in bare("docs", "asyncapi", code=2).stderr
