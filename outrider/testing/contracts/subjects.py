"""Contract rules for the keys of subjects: how they are made and destroyed, and consumers after that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest

from outrider.errors import InvalidPayload, KeyMissing, SubjectErased, UsageError
from outrider.event import Delivery, erased_name
from outrider.inbox.model import InboxCriteria
from outrider.payload.model import PayloadFacts
from outrider.payload.payloads import Payloads
from outrider.privacy import subjects as subjects_module
from outrider.privacy.encryption import FieldEncryption
from outrider.privacy.keys import DataKey, EnvironmentKeys, KeyRing
from outrider.privacy.store import SubjectKeyCounts, SubjectKeyStore
from outrider.privacy.subjects import SubjectKeys
from outrider.telemetry.events import ErasedEventSkipped, Handled
from outrider.testing.harness import TOPIC, TYPE, ConsumerHarness, InboxBench, delivery

ANN, BOB = "customer:1", "customer:2"

MASTER = "SUBJECT_MASTER_KEYS"


@dataclass(frozen=True, slots=True)
class SubjectBench:
    """An inbox under test, and a function that opens the table of keys, as another process would."""

    inbox: InboxBench
    opening: Callable[[], Awaitable[SubjectKeyStore]]


class InterruptedKeys:
    """A table of keys whose process dies before the second page of a rewrapping is written."""

    def __init__(self, store: SubjectKeyStore) -> None:
        self._store, self._pages = store, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def rewrap_subject_keys(self, changes: list[tuple[str, str, str]]) -> int:
        """Write a page, or die."""
        self._pages -= 1
        if self._pages < 0:
            raise KeysKilled
        return await self._store.rewrap_subject_keys(changes)


class KeysKilled(Exception):
    """The end of a process in the middle of a rewrapping."""


class SubjectContract:
    """All rules of the keys of subjects. Subclass it, and give it a `bench` fixture."""

    @pytest.fixture(autouse=True)
    def _master(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(MASTER, DataKey.new("m1").text)

    @asynccontextmanager
    async def keys(self, bench: SubjectBench) -> AsyncIterator[SubjectKeys]:
        """Open the keys as a process of its own has them."""
        found = SubjectKeys(bench.opening, "the test", KeyRing(EnvironmentKeys(MASTER)))
        try:
            yield found
        finally:
            await asyncio.to_thread(found.close)

    @asynccontextmanager
    async def cipher(self, bench: SubjectBench) -> AsyncIterator[FieldEncryption]:
        """Encrypt one field as a process of its own would. The ring has no key: subjects alone encrypt."""
        async with self.keys(bench) as subjects:
            ring = KeyRing(EnvironmentKeys("ABSENT_KEYS"))
            yield FieldEncryption(keys=ring, sensitive={TYPE: ["email"]}, subjects=subjects)

    async def sealed(
        self, cipher: FieldEncryption, number: int, subject: str, event_id: UUID | None = None, **headers: str
    ) -> Delivery:
        """Make the delivery of an event with an encrypted field, as a relay would have published it."""
        event_id = event_id or uuid4()
        await cipher.load([(TYPE, subject)], [])
        payload = cipher.encrypt(facts(event_id, subject), {"number": number, "email": f"{subject}@example.com"})
        plain = delivery(number, event_id=event_id, subject=subject, **headers)
        return plain._replace(body=json.dumps(payload).encode())

    def consumer(self, bench: SubjectBench, cipher: FieldEncryption, **settings: Any) -> ConsumerHarness:
        """Make a consumer that decrypts."""
        routes = bench.inbox.routes(**settings)
        routes.payloads = Payloads(encryption=cipher)
        return ConsumerHarness(bench.inbox, routes)

    async def test_two_processes_that_make_the_key_of_a_subject_at_once_agree(self, bench: SubjectBench) -> None:
        async with self.keys(bench) as one, self.keys(bench) as two:
            await asyncio.gather(*(each.load([ANN, BOB], []) for each in (one, two) for _ in range(3)))
            keys = [(each.key_of(ANN), each.key_of(BOB)) for each in (one, two)]
            assert keys[0] == keys[1]
            assert keys[0][0] != keys[0][1]
            assert await one.counts() == SubjectKeyCounts(2, 0)

    async def test_the_table_holds_wrapped_keys_whose_ids_say_nothing_about_their_subjects(
        self, bench: SubjectBench
    ) -> None:
        async with self.keys(bench) as keys:
            key = await asyncio.to_thread(keys.key_of, ANN)
            assert key is not None
            store = await bench.opening()
            [stored] = await store.subject_keys([ANN], [])
            await store.close()
            assert (stored.id, stored.subject, stored.destroyed_at) == (key.id, ANN, None)
            assert key.id.startswith("s-")
            assert key.text.partition(":")[2][:20] not in repr(stored)

    async def test_a_destroyed_key_leaves_no_secret_and_no_name_and_a_later_event_gets_a_new_key(
        self, bench: SubjectBench
    ) -> None:
        async with self.keys(bench) as keys:
            await keys.load([ANN, BOB], [])
            first, other = keys.key_of(ANN), keys.key_of(BOB)
            assert first is not None
            assert await keys.destroy(ANN) == [first.id]
            assert await keys.destroy(ANN) == []
            [gone] = await keys.destroyed(ANN)
            assert (gone.id, gone.subject, gone.wrapped) == (first.id, erased_name(ANN), None)
            assert gone.destroyed_at is not None
            found = await asyncio.to_thread(keys.find, first.id)
            assert found is not None
            assert (found.key, found.destroyed_at) == (None, gone.destroyed_at)
            second = await asyncio.to_thread(keys.key_of, ANN)
            assert second is not None
            assert second.id != first.id
            assert keys.key_of(BOB) == other
            assert await keys.destroy(ANN) == [second.id]
            assert {each.id for each in await keys.destroyed(ANN)} == {first.id, second.id}
            assert await keys.counts() == SubjectKeyCounts(1, 2)

    async def test_a_value_does_not_open_at_an_event_of_another_subject(self, bench: SubjectBench) -> None:
        async with self.cipher(bench) as cipher:
            event_id = uuid4()
            sent = await self.sealed(cipher, 1, ANN, event_id)
            payload = json.loads(sent.body)
            assert cipher.decrypt(facts(event_id, ANN), payload)["email"] == f"{ANN}@example.com"
            with pytest.raises(InvalidPayload, match="of another subject than that of the event"):
                cipher.decrypt(facts(event_id, BOB), payload)
            with pytest.raises(InvalidPayload, match="belongs to another event or field"):
                cipher.decrypt(facts(uuid4(), ANN), payload)
            absent = {"email": {**payload["email"], "key": "s-0000000000000000"}}
            with pytest.raises(KeyMissing, match="key s-0000000000000000, which the table"):
                await asyncio.to_thread(cipher.decrypt, facts(event_id, ANN), absent)

    async def test_another_process_stops_using_a_destroyed_key_within_a_minute(
        self, bench: SubjectBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with self.cipher(bench) as cipher, self.keys(bench) as eraser:
            event_id = uuid4()
            payload = json.loads((await self.sealed(cipher, 1, ANN, event_id)).body)
            assert await eraser.destroy(ANN) == [payload["email"]["key"]]
            assert cipher.decrypt(facts(event_id, ANN), payload)["email"] == f"{ANN}@example.com"
            monkeypatch.setattr(subjects_module, "KEY_SECONDS", 0.0)
            await cipher.load([], [payload])
            monkeypatch.setattr(subjects_module, "KEY_SECONDS", 60.0)
            with pytest.raises(SubjectErased, match=r"its subject was erased: the key s-.* was destroyed on"):
                cipher.decrypt(facts(event_id, ANN), payload)

    async def test_an_event_of_an_erased_subject_is_skipped_with_a_receipt_and_the_sequence_goes_on(
        self, bench: SubjectBench
    ) -> None:
        async with self.cipher(bench) as cipher, self.cipher(bench) as consuming, self.keys(bench) as eraser:
            sent = [await self.sealed(cipher, number, BOB if number == 2 else ANN) for number in (1, 2, 3)]
            await eraser.destroy(BOB)
            consumer = self.consumer(bench, consuming, ordering="strict")
            await consumer.deliver_all(sent)
            assert await bench.inbox.effects() == ["A-1:1", "A-1:3"]
            assert await bench.inbox.store.admin.dead_letters(InboxCriteria()) == []
            [skipped] = bench.inbox.observer.of(ErasedEventSkipped)
            assert (skipped.consumer, skipped.event_type) == ("billing", TYPE)
            assert str(skipped.event_id) == sent[1].headers["message_id"].decode()
            assert sum(handled.erased for handled in bench.inbox.observer.of(Handled)) == 1
            assert await consumer.deliver(sent[1]) == 1
            assert bench.inbox.observer.of(Handled)[-1].duplicates == 1

    async def test_a_held_event_whose_subject_is_erased_meanwhile_is_skipped_when_its_stream_drains(
        self, bench: SubjectBench
    ) -> None:
        async with self.cipher(bench) as cipher, self.cipher(bench) as consuming, self.keys(bench) as eraser:
            sent = [await self.sealed(cipher, number, BOB if number == 2 else ANN) for number in (1, 2, 3)]
            settings = {"ordering": "strict", "first_sequence": "one"}
            await self.consumer(bench, cipher, **settings).deliver_all([sent[1], sent[2]])
            assert await bench.inbox.effects() == []
            await eraser.destroy(BOB)
            # Another process, which does not remember the key.
            await self.consumer(bench, consuming, **settings).deliver_all([sent[0]])
            assert await bench.inbox.effects() == ["A-1:1", "A-1:3"]
            assert len(bench.inbox.observer.of(ErasedEventSkipped)) == 1
            assert await bench.inbox.store.admin.streams("billing", 10) == []

    async def test_a_new_master_key_takes_over_the_keys_page_by_page_and_a_killed_run_goes_on(
        self, bench: SubjectBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(subjects_module, "PAGE", 2)
        masters, names = [DataKey.new("m1"), DataKey.new("m2")], [f"customer:{number}" for number in range(5)]
        monkeypatch.setenv(MASTER, masters[0].text)
        async with self.keys(bench) as keys:
            await keys.load([*names, "gone"], [])
            await keys.destroy("gone")
            known = {name: keys.key_of(name) for name in names}
        monkeypatch.setenv(MASTER, " ".join(key.text for key in reversed(masters)))

        async def interrupted() -> Any:
            return InterruptedKeys(await bench.opening())

        killed = SubjectKeys(interrupted, "the test", KeyRing(EnvironmentKeys(MASTER)))
        with pytest.raises(KeysKilled):
            await killed.rewrap()
        await asyncio.to_thread(killed.close)
        async with self.keys(bench) as keys:
            examined: list[int] = []
            assert (await keys.rewrap(examined.append), await keys.rewrap()) == (3, 0)
            assert examined == [2, 4, 5]
        monkeypatch.setenv(MASTER, masters[1].text)
        async with self.keys(bench) as keys:
            await keys.load(names, [])
            assert {name: keys.key_of(name) for name in names} == known
        monkeypatch.setenv(MASTER, masters[0].text)
        async with self.keys(bench) as keys:
            with pytest.raises(UsageError, match="wrapped with the master key m2"):
                await keys.rewrap()

    async def test_keys_that_were_exchanged_between_subjects_do_not_open(self, bench: SubjectBench) -> None:
        async with self.cipher(bench) as cipher, self.cipher(bench) as other:
            event_id = uuid4()
            payload = json.loads((await self.sealed(cipher, 1, ANN, event_id)).body)
            await self.sealed(cipher, 1, BOB)
            store = await bench.opening()
            forms = {each.id: each.wrapped or "" for each in await store.subject_keys([ANN, BOB], [])}
            (one, first), (two, second) = forms.items()
            assert await store.rewrap_subject_keys([(one, second, first)]) == 0
            assert await store.rewrap_subject_keys([(one, first, second), (two, second, first)]) == 2
            await store.close()
            await other.load([], [payload])
            with pytest.raises(KeyMissing, match="it was changed, or belongs to another subject"):
                other.decrypt(facts(event_id, ANN), payload)


def facts(event_id: UUID, subject: str) -> PayloadFacts:
    """Return the facts of an event of a subject."""
    return PayloadFacts(event_id, TYPE, 1, TOPIC, "A-1", subject)
