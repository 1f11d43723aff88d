"""Contract rules for encrypted fields: what a store holds, and plain rows of other programs."""

from __future__ import annotations

import json
import logging
from typing import Any
from uuid import uuid4

import pytest

from outrider import Event
from outrider.app import Outbox
from outrider.event import Delivery
from outrider.outbox.model import Criteria
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.validation import StagingRules, validate_edit
from outrider.payload.payloads import Payloads
from outrider.privacy.encryption import FieldEncryption
from outrider.privacy.keys import KeyRing
from outrider.telemetry.events import Observers
from outrider.telemetry.log_observer import LogObserver
from outrider.testing.fakes import MemoryBroker
from outrider.testing.harness import Harness
from outrider.wire import decode

CANARY = "canary@example.com"
"""The value that nothing but a holder of the keys may see."""

SENSITIVE = {"order.placed": ["customer.email", "items[*].note"]}


def order(email: Any = CANARY) -> dict[str, Any]:
    """Return a payload with two sensitive fields."""
    return {"customer": {"email": email, "id": 7}, "items": [{"note": email, "sku": "x"}], "total": 12}


def encrypting(keys: KeyRing) -> Payloads:
    """Return payloads that encrypt two fields."""
    return Payloads(encryption=FieldEncryption(keys=keys, sensitive=SENSITIVE))


class EncryptionContract:
    """All rules of encrypted fields in a store. Subclass it, and give it a `harness` fixture, and one named `keys`."""

    def relay(self, harness: Harness, broker: MemoryBroker, payloads: Payloads) -> Relay:
        """Make a relay that logs, and that a test runs step by step."""
        observer = Observers([harness.observer, LogObserver()])
        settings = RelaySettings(workers=1)
        return Relay(harness.store, broker, settings, clock=harness.clock, observer=observer, payloads=payloads)

    async def test_a_store_and_a_broker_hold_encrypted_values_which_a_consumer_opens(
        self, harness: Harness, keys: KeyRing
    ) -> None:
        payloads, broker = encrypting(keys), MemoryBroker(ordered=True)
        outbox = Outbox(payloads=payloads)
        event = Event("order.placed", order(), topic="orders", key="A")
        [event_id] = await harness.transact(lambda conn: outbox.stage(conn, event))
        stored = await harness.store.admin.event(event_id)
        assert CANARY not in json.dumps(stored, default=str)
        assert stored["payload"]["total"] == 12
        await harness.works(self.relay(harness, broker, payloads))
        [message] = broker.log
        assert CANARY.encode() not in message.body
        headers = {name: text.encode() for name, text in message.headers.items()}
        received = decode(Delivery("orders", b"A", message.body, headers)).event
        assert received is not None
        assert payloads.open(received).payload == order()

    async def test_plain_text_of_another_program_is_dead_lettered_and_never_shown(
        self, harness: Harness, keys: KeyRing, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, logger="outrider")
        payloads, broker, ids = encrypting(keys), MemoryBroker(ordered=True), [uuid4(), uuid4()]
        await harness.insert(ids[0], "order.placed", json.dumps(order()), "A")
        await harness.insert(ids[1], "order.placed", json.dumps({"n": 1}), "A")
        relay = self.relay(harness, broker, payloads)
        await harness.works(relay)
        assert broker.log == []
        [letter] = await harness.store.admin.dead_letters(Criteria())
        assert (letter["event_id"], letter["reason"]) == (ids[0], "encryption_failed")
        assert letter["failure"]["error"] == "payload.customer.email: it must be encrypted, and is stored as plain text"
        assert CANARY not in json.dumps({**letter, "payload": None}, default=str)
        logged = repr([vars(record) for record in caplog.records if record.name.startswith("outrider")])
        assert "encryption_failed" in logged
        assert CANARY not in logged + repr(harness.observer.events)
        edit = validate_edit(letter, StagingRules(payloads=payloads), payload=json.dumps(order()))
        assert await harness.store.admin.edit(ids[0], "ann", edit)
        assert await harness.store.admin.replay([ids[0]], "ann") == 1
        await harness.works(relay)
        assert [message.message_id for message in broker.log] == [str(event_id) for event_id in ids]
        assert CANARY.encode() not in broker.log[0].body
