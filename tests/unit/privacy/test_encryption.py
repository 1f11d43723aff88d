"""Encrypted fields: every value survives, and a value that was changed or moved does not open."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import Event, InvalidEvent
from outrider.app import Outbox
from outrider.errors import InvalidPayload, KeyMissing, KeysUnavailable, UsageError
from outrider.event import DeadLetterReason
from outrider.outbox.model import Criteria
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.validation import StagingRules, validate_edit, validate_events
from outrider.payload import PayloadFacts, Payloads, Rule, Upcaster
from outrider.privacy import DataKey, FieldEncryption, KeyRing
from outrider.privacy.encryption import MARK
from outrider.stores.memory import MemoryStore
from outrider.testing import ManualClock, MemoryBroker
from tests.support.key_rings import ListedKeys
from tests.support.memory_benches import MemoryHarness

OLD, NEW = DataKey.new("old"), DataKey.new("new")
SENSITIVE = {"order.*": ["customer.email", "items[*].note"], "person.moved": ["*"]}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=10,
)


def encryption(*keys: DataKey) -> FieldEncryption:
    return FieldEncryption(keys=KeyRing(ListedKeys(*keys or (NEW, OLD))), sensitive=SENSITIVE)


def facts(event_type: str = "order.placed", event_id: UUID | None = None) -> PayloadFacts:
    return PayloadFacts(event_id or UUID(int=7), event_type, 1, "orders", "A")


STORED = """{"customer": {"email": {"$encrypted": 1, "key": "first", "nonce": "t73IGLvMKTMYhXXJ", "data":
"yKNH1z9zRyHts7FjhZPSsd1kR1qAAil6Uwi7MGwqOkLw"}}, "items": [{"note": {"$encrypted": 1, "key": "first", "nonce":
"NJalyJsVNGSY4m/D", "data": "fJFOhEra7VZguB7XJ1EQxWOTFeh9PAh300SZYCM="}}, {"note": {"$encrypted": 1, "key": "first",
"nonce": "2EiHFSh2m05O7790", "data": "XYIaksW/y9HqcV/a9M6aWFYJrs4="}}, {"note": {"$encrypted": 1, "key": "first",
"nonce": "Rw/mLShIujvXW3VF", "data": "cHT+EGmVswbeE2JaMGiwU5eQb6fr/3MR33G37uPRC3m56A=="}}], "extra": {"a \\"b\\"":
{"$encrypted": 1, "key": "first", "nonce": "TN8fCJ8tanQtS3/j", "data":
"bxEq0G03Bu89kogGg+sAnIaDKpR8eqt9oOE/9PX5u71PNtwGW1NJ"}}}"""
"""A payload that an earlier version has encrypted."""
PLAIN: Any = {
    "customer": {"email": "ann@example.com"},
    "items": [{"note": "nä\U0001f600 \ud800"}, {"note": None}, {"note": {"a": [1, 2.5, True]}}],
    "extra": {'a "b"': 12345678901234567890123},
}


def test_stored_values_open_in_every_later_version(monkeypatch: pytest.MonkeyPatch) -> None:
    key = DataKey("first", b"A" * 32)
    cipher = FieldEncryption(
        keys=KeyRing(ListedKeys(key)), sensitive={'order.ü"x': ["customer.email", "items[*].note", "extra.*"]}
    )
    about = PayloadFacts(UUID("01890a5d-ac96-774b-bcce-b302099a8057"), 'order.ü"x', 1, "", None)
    stored = json.loads(STORED)
    assert cipher.decrypt(about, stored) == PLAIN
    # With the nonces of the stored values, the same values are written.
    nonces = iter(base64.b64decode(nonce) for nonce in re.findall(r'"nonce":\s*"([^"]+)"', STORED))
    monkeypatch.setattr(os, "urandom", lambda size: next(nonces))
    assert cipher.encrypt(about, PLAIN) == stored


def order(email: Any = "ann@example.com", *notes: Any) -> dict[str, Any]:
    return {"customer": {"email": email, "id": 7}, "items": [{"note": note, "sku": "x"} for note in notes]}


@given(email=VALUES, notes=st.lists(VALUES, max_size=2))
def test_any_value_survives_encryption_and_leaves_no_plain_text(email: Any, notes: list[Any]) -> None:
    cipher, payload = encryption(), order(email, *notes)
    before = copy.deepcopy(payload)
    sealed = cipher.encrypt(facts(), payload)
    assert payload == before
    leaves = [sealed["customer"]["email"], *(item["note"] for item in sealed["items"])]
    assert all(set(leaf) == {MARK, "key", "nonce", "data"} for leaf in leaves)
    assert cipher.plaintext_path(facts(), sealed) is None
    stored = json.loads(json.dumps(sealed))
    assert repr(cipher.decrypt(facts(), stored)) == repr(payload)


@given(payload=VALUES)
def test_a_payload_without_encrypted_values_is_the_same_object_when_opened(payload: Any) -> None:
    assert encryption().decrypt(facts(), payload) is payload
    assert encryption().encrypt(facts("stock.moved"), payload) is payload


def test_a_flipped_bit_is_refused_wherever_it_is() -> None:
    cipher = encryption()
    sealed = cipher.encrypt(facts(), order())
    refused = 0
    for name in ("nonce", "data"):
        raw = base64.b64decode(sealed["customer"]["email"][name])
        for bit in range(len(raw) * 8):
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            forged = copy.deepcopy(sealed)
            forged["customer"]["email"][name] = base64.b64encode(changed).decode()
            with pytest.raises(InvalidPayload, match=r"payload\.customer\.email: it does not open"):
                cipher.decrypt(facts(), forged)
            refused += 1
    assert refused > 300


@pytest.mark.parametrize("change", ["event", "type", "field", "item", "key"])
def test_a_value_that_was_moved_is_refused(change: str) -> None:
    cipher = encryption()
    sealed, about = cipher.encrypt(facts(), order("e", "first", "second")), facts()
    if change == "event":
        about = facts(event_id=uuid4())
    elif change == "type":
        about = facts("order.closed")
    elif change == "field":
        sealed["customer"]["email"] = sealed["items"][0]["note"]
    elif change == "item":
        sealed["items"].reverse()
    else:
        sealed["customer"]["email"]["key"] = OLD.id
    with pytest.raises(InvalidPayload, match="it was changed, or belongs to another event or field") as caught:
        cipher.decrypt(about, sealed)
    assert caught.value.reason == DeadLetterReason.ENCRYPTION_FAILED


def test_a_nonce_never_repeats() -> None:
    cipher = encryption()
    sealed = [cipher.encrypt(facts(), order("same"))["customer"]["email"] for _ in range(20_000)]
    assert len({each["nonce"] for each in sealed}) == len({each["data"] for each in sealed}) == 20_000


@pytest.mark.parametrize(
    "hidden",
    [
        {MARK: 1, "key": "new", "nonce": "AAAAAAAAAAAAAAAA", "data": "ann@example.com"},
        {MARK: 1, "key": "ann@example.com", "nonce": "AAAAAAAAAAAAAAAA", "data": "A" * 24},
        {MARK: 1, "key": "new", "nonce": "ann@example.com", "data": "A" * 24},
        {MARK: 1, "key": "new", "nonce": "AAAAAAAAAAAAAAAA", "data": "A" * 24, "email": "ann@example.com"},
        {MARK: "ann@example.com"},
        {MARK: True, "key": "new", "nonce": "AAAAAAAAAAAAAAAA", "data": "A" * 24},
    ],
)
def test_plain_text_does_not_hide_behind_the_mark(hidden: Any) -> None:
    assert encryption().plaintext_path(facts(), order(hidden)) == "payload.customer.email"
    with pytest.raises(InvalidPayload):
        encryption().decrypt(facts(), order(hidden))


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        (order("ann@example.com"), "payload.customer.email"),
        ({"items": [{"note": "x"}]}, "payload.items[0].note"),
        ({"customer": "ann@example.com"}, "payload.customer"),
        ({"items": {"note": "x"}}, "payload.items"),
        ("ann@example.com", "payload"),
        ({"customer": None, "items": []}, None),
        ({"total": 12}, None),
    ],
)
def test_plain_text_is_found_by_its_path_also_where_the_payload_has_another_form(payload: Any, path: str) -> None:
    assert encryption().plaintext_path(facts(), payload) == path


def test_a_payload_of_another_form_is_refused_at_staging() -> None:
    with pytest.raises(InvalidEvent, match=r"payload\.customer: it is no object"):
        encryption().encrypt(facts(), {"customer": "ann@example.com"})


def test_all_members_of_an_object_are_encrypted() -> None:
    sealed = encryption().encrypt(facts("person.moved"), {"street": "x", "city": "y"})
    assert all(MARK in value for value in sealed.values())


@pytest.mark.parametrize(
    "paths", [["*", "customer.email"], ["customer.email", "*"], ["customer", "customer.email"], ["*.email", "customer"]]
)
def test_the_larger_of_two_paths_counts(paths: list[str]) -> None:
    cipher = FieldEncryption(keys=KeyRing(ListedKeys(NEW)), sensitive={"t": paths})
    sealed = cipher.encrypt(facts("t"), {"customer": {"email": "e", "name": "n"}})
    assert MARK in sealed["customer"]
    assert cipher.decrypt(facts("t"), sealed) == {"customer": {"email": "e", "name": "n"}}


def test_a_missing_key_is_named_and_a_value_of_the_old_key_still_opens() -> None:
    sealed = encryption(OLD).encrypt(facts(), order())
    assert encryption(NEW, OLD).decrypt(facts(), sealed) == order()
    with pytest.raises(KeyMissing, match="encrypted with the key old, which the list does not have"):
        encryption(NEW).decrypt(facts(), sealed)


@pytest.mark.parametrize("wrong", [{"order.placed": "customer"}, {"o*r": ["x"]}, {"": ["x"]}, {"t": ["items[0]"]}])
def test_a_path_that_cannot_work_is_rejected_at_once(wrong: Any) -> None:
    with pytest.raises(UsageError):
        FieldEncryption(keys=KeyRing(ListedKeys(NEW)), sensitive=wrong)


# With Payloads.

SCHEMA = {"properties": {"customer": {"properties": {"email": {"type": "string"}}}}}


def staged(payloads: Payloads, payload: Any, **changes: Any) -> Any:
    event = Event("order.placed", payload, event_id=UUID(int=7), key="A", **changes)
    return json.loads(validate_events([event], StagingRules(payloads=payloads)).plain[0].payload)


def test_staging_validates_the_plain_values_and_writes_the_encrypted_ones() -> None:
    payloads = Payloads({"order.placed": {1: SCHEMA}}, encryption=encryption())
    sealed = staged(payloads, order("ann@example.com", "leave at the door"))
    assert payloads.encryption is not None
    assert payloads.encryption.decrypt(facts(), sealed) == order("ann@example.com", "leave at the door")
    assert "ann@" not in json.dumps(sealed)
    with pytest.raises(InvalidEvent, match=r"payload\.customer\.email: .*string"):
        staged(payloads, order(12))


def test_plain_text_is_refused_at_staging_when_there_is_no_key() -> None:
    payloads = Payloads(encryption=FieldEncryption(keys=KeyRing(ListedKeys()), sensitive=SENSITIVE))
    events = [Event("stock.moved", {}), Event("order.placed", order("ann@example.com"))]
    with pytest.raises(InvalidEvent, match=r"events\[1\]\.payload\.customer\.email: .* the list has no key") as caught:
        validate_events(events, StagingRules(payloads=payloads))
    assert "ann@" not in str(caught.value)


def test_a_value_with_the_mark_is_refused_at_staging_unless_it_is_of_the_event_itself() -> None:
    payloads = Payloads({"order.placed": {1: SCHEMA}}, encryption=encryption())
    sealed = staged(payloads, order())
    with pytest.raises(InvalidEvent, match=r"payload\.other: it does not open"):
        staged(payloads, {"other": sealed["customer"]["email"]})
    edit = {"event_type": "order.placed", "topic": "orders", "event_id": UUID(int=7)}
    text = validate_edit(edit, StagingRules(payloads=payloads), payload=json.dumps({**sealed, "total": 1})).payload
    assert payloads.encryption is not None
    assert payloads.encryption.decrypt(facts(), json.loads(text or "")) == {**order(), "total": 1}


def test_the_limit_of_a_payload_counts_its_encrypted_values() -> None:
    rules = StagingRules(payloads=Payloads(encryption=encryption()), payload_bytes_max=60)
    with pytest.raises(InvalidEvent, match=r"payload: it has \d+ bytes once encrypted, the destination takes 60"):
        validate_events([Event("order.placed", order("a"))], rules)


def test_a_relay_with_the_keys_checks_the_plain_values_and_one_without_leaves_that_to_staging() -> None:
    schemas = {"order.placed": {1: SCHEMA}}
    sealed = json.dumps(encryption().encrypt(facts(), order(12))).encode()
    with pytest.raises(InvalidPayload, match=r"payload\.customer\.email: .*string"):
        Payloads(schemas, encryption=encryption()).check_payload(facts(), sealed)
    Payloads(schemas, encryption=encryption(OLD)).check_payload(facts(), sealed)
    with pytest.raises(InvalidPayload, match="must be encrypted, and is stored as plain text") as caught:
        Payloads(schemas, encryption=encryption(OLD)).check_payload(facts(), json.dumps(order("a")).encode())
    assert caught.value.reason == DeadLetterReason.ENCRYPTION_FAILED


def test_an_event_is_decrypted_before_it_is_upcast() -> None:
    def mailed(payload: Any) -> Any:
        return {**payload, "mail": payload["customer"]["email"].upper()}

    cipher = encryption()
    payloads = Payloads(encryption=cipher, upcasters=[Upcaster("order.placed", 1, 2, mailed)])
    event = Event("order.placed", cipher.encrypt(facts(), order("a@b")), event_id=UUID(int=7))
    assert payloads.open(event).payload["mail"] == "A@B"


def test_rules_see_the_plain_values() -> None:
    rule = Rule("has an at", "order.*", lambda _, payload: "@" in payload["customer"]["email"])
    payloads = Payloads(rules=[rule], encryption=encryption())
    staged(payloads, order("a@b"))
    with pytest.raises(InvalidEvent, match="has an at"):
        staged(payloads, order("nobody"))


async def test_a_relay_defers_events_while_the_keys_cannot_be_read_and_counts_no_attempt() -> None:
    keys = ListedKeys(NEW)
    keys.error = KeysUnavailable("the list is away")
    rules = [Rule("any", "order.*", lambda *_: True)]
    payloads = Payloads(rules=rules, encryption=FieldEncryption(keys=KeyRing(keys), sensitive=SENSITIVE))
    store, broker = MemoryStore(), MemoryBroker()
    harness = MemoryHarness(store, ManualClock())
    writing = Outbox(payloads=Payloads(encryption=encryption()))
    await harness.transact(lambda conn: writing.stage(conn, Event("order.placed", order(), key="A")))
    relay = Relay(store, broker, RelaySettings(workers=1), clock=harness.clock, payloads=payloads)
    await harness.works(relay)
    assert broker.log == []
    assert await store.admin.dead_letters(Criteria()) == []
    [event] = await store.admin.events(Criteria())
    assert event["attempts"] == 0
