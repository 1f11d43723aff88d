"""Encrypted replies of sagas: correlate and steps read plain values, the mailbox keeps ciphertext."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from outrider import Event
from outrider.errors import KeyMissing
from outrider.payload import PayloadFacts, Payloads
from outrider.privacy import DataKey, FieldEncryption, KeyRing
from outrider.saga import Saga, SagaRegistry
from outrider.saga.model import Status
from outrider.testing.saga_harness import SagaHarness
from tests.support.key_rings import ListedKeys

KEY = DataKey.new("first")


@dataclass
class Order:
    order_id: str
    length: int = 0


def payloads(*keys: DataKey) -> Payloads:
    ring = KeyRing(ListedKeys(*keys))
    return Payloads(encryption=FieldEncryption(keys=ring, sensitive={"order.paid": ["order", "card.holder"]}))


def harness(*keys: DataKey) -> SagaHarness:
    saga = Saga("order", Order)

    @saga.wait("order.paid", correlate=lambda event: event.payload["order"]).on("order.paid")
    def paid(context: Any, reply: Any) -> None:
        context.state.length = len(reply.payload["card"]["holder"])

    return SagaHarness(SagaRegistry(saga, payloads=payloads(*keys)))


def paid_event() -> Event:
    """Return the event as a consumer receives it."""
    cipher, event_id = payloads(KEY).encryption, uuid4()
    assert cipher is not None
    facts = PayloadFacts(event_id, "order.paid", 1, "orders", None)
    sealed = cipher.encrypt(facts, {"order": "A-7", "card": {"holder": "Ann Canary"}})
    return Event("order.paid", json.loads(json.dumps(sealed)), event_id=event_id)


async def test_a_saga_is_found_and_continued_by_encrypted_fields_which_its_mailbox_keeps_encrypted() -> None:
    at = harness(KEY)
    [saga] = at.sagas
    async with at.store.transaction() as tx:
        saga_id = await saga.start(tx, Order("A-7"), correlation_id="A-7", outbox=at.outbox)
    async with at.store.transaction() as tx:
        assert await at._replies.deliver("order", paid_event(), tx)
    [message] = (await at.store.admin.show(saga_id)).messages
    assert b"$encrypted" in message.body
    assert b"Canary" not in message.body
    await at.run()
    found = await at.saga("A-7")
    assert (found.status, found.state.length) == (Status.COMPLETED, len("Ann Canary"))


async def test_a_reply_whose_key_is_missing_is_not_delivered_and_the_key_is_named() -> None:
    at = harness()
    with pytest.raises(KeyMissing, match="the key first, which the list does not have"):
        async with at.store.transaction() as tx:
            await at._replies.deliver("order", paid_event(), tx)
