"""The encryption of a stored saga: its state, the data of its journal, and the final state that a child reports.

The planner and the code of steps see plain values only: a turn opens what it has read, and encrypts what it writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from uuid import UUID

from outrider.errors import InvalidEvent, InvalidPayload, KeyMissing
from outrider.event import DeadLetterReason
from outrider.payload.model import PayloadCipher, PayloadFacts, journal_facts, state_facts
from outrider.payload.payloads import Payloads
from outrider.privacy.keys import subject_key_ids
from outrider.saga.model import Instance, JournalEntry, NewSaga, NewSagaMessage, SagaChange, SagaRecord
from outrider.saga.state.codec import as_text

MARKED = re.compile(rb'"\$encrypted"\s*:')
"""The member name in JSON text. Inside of a text value its quotes would be escaped."""

ENCRYPTED = re.compile(rb'"\$encrypted"\s*:\s*1\s*,\s*"key"')
"""The beginning of an encrypted value."""


class StoredTurn(NamedTuple):
    """The writes of a turn as the store gets them."""

    change: SagaChange
    children: Sequence[NewSaga]
    messages: Sequence[NewSagaMessage]


def open_record(payloads: Payloads | None, record: SagaRecord) -> SagaRecord:
    """Return a saga with its state and its journal as plain values.

    Raises KeyMissing without the key, KeysUnavailable if the keys cannot be read, SubjectErased if the key was
    destroyed, and InvalidPayload for a value that was changed or belongs to another saga.
    """
    instance = record.instance
    facts = state_facts(instance.saga_id, instance.saga_type, instance.subject)
    state = _opened(payloads, facts, instance.state, "state")
    journal = tuple(_opened_entry(payloads, record, entry) for entry in record.journal)
    if state is instance.state and all(one is other for one, other in zip(journal, record.journal, strict=True)):
        return record
    return record._replace(instance=replace(instance, state=state), journal=journal)


def open_state(payloads: Payloads | None, saga_id: UUID, saga_type: str, stored: bytes) -> bytes:
    """Return a stored state of an unknown subject with plain values, or raise as `open_record` does."""
    return _opened(payloads, state_facts(saga_id, saga_type, None), stored, "state")


async def load_keys(payloads: Payloads | None, records: Sequence[SagaRecord]) -> None:
    """Read the keys of sagas, and of replies in their mailboxes, while the event loop goes on.

    The subject of a saga gets a key here, unless the saga has a value under the key of a subject: that key may be
    destroyed, and an erased subject gets no new key.
    """
    if payloads is None:
        return
    texts: list[bytes] = []
    new: list[NewSaga | Instance] = []
    for instance, journal, messages, *_ in records:
        own = [instance.state, *(entry.data.encode() for entry in journal if entry.data)]
        texts += [*own, *(message.body for message in messages)]
        if not any(subject_key_ids(text) for text in own):
            new.append(instance)
    await payloads.load([], subjects=_subjects(new), payloads=texts)


async def load_new_keys(payloads: Payloads | None, sagas: Sequence[NewSaga | Instance]) -> None:
    """Read or make the keys of the subjects of sagas that are going to be written, while the event loop goes on."""
    if payloads is not None:
        await payloads.load([], subjects=_subjects(sagas))


def _subjects(sagas: Sequence[NewSaga | Instance]) -> list[tuple[str, str]]:
    """Return the names of states and their subjects, as keys are asked for."""
    named = (state_facts(saga.saga_id, saga.saga_type, saga.subject) for saga in sagas)
    return [(facts.event_type, facts.subject) for facts in named if facts.subject is not None]


def without_encrypted_data(record: SagaRecord) -> SagaRecord:
    """Return a saga without the journal data that is encrypted, for an explanation where the keys are not."""
    journal = tuple(
        replace(entry, data=None) if entry.data and is_encrypted(entry.data.encode()) else entry
        for entry in record.journal
    )
    return record._replace(journal=journal)


def encrypt_new(payloads: Payloads | None, saga: NewSaga) -> NewSaga:
    """Return a saga to be started, with the sensitive fields of its state encrypted. Raises InvalidEvent."""
    state = _encrypted(payloads, state_facts(saga.saga_id, saga.saga_type, saga.subject), saga.state)
    return saga if state is saga.state else saga._replace(state=state)


def encrypt_turn(
    payloads: Payloads | None, change: SagaChange, children: Sequence[NewSaga], messages: Sequence[NewSagaMessage]
) -> StoredTurn:
    """Return the writes of a turn with all sensitive values encrypted. A message without a body reports the state.

    Raises InvalidEvent with the path of a field that cannot be encrypted, and KeysUnavailable.
    """
    instance = change.instance
    facts = state_facts(instance.saga_id, instance.saga_type, instance.subject)
    sealed, cipher = _encrypted(payloads, facts, instance.state), _cipher_of(payloads, facts)
    started = [encrypt_new(payloads, child) for child in children]
    if cipher is None:
        sent = [message if message.body else message._replace(body=instance.state) for message in messages]
        return StoredTurn(change, started, sent)
    sent = [message if message.body else _report(cipher, message, instance) for message in messages]
    entries = [entry if entry.data is None else _encrypted_entry(cipher, change, entry) for entry in change.entries]
    return StoredTurn(replace(change, instance=replace(instance, state=sealed), entries=entries), started, sent)


def is_encrypted(text: bytes) -> bool:
    """Return whether a stored text has an encrypted value."""
    return ENCRYPTED.search(text) is not None


def _opened_entry(payloads: Payloads | None, record: SagaRecord, entry: JournalEntry) -> JournalEntry:
    if entry.data is None or not is_encrypted(entry.data.encode()):
        return entry
    facts = journal_facts(record.instance.saga_id, entry.step, entry.phase, record.instance.subject)
    return replace(entry, data=_opened(payloads, facts, entry.data.encode(), f"the data of {entry.step}").decode())


def _opened(payloads: Payloads | None, facts: PayloadFacts, stored: bytes, name: str) -> bytes:
    if MARKED.search(stored) is None:
        return stored
    cipher = payloads.encryption if payloads is not None else None
    if cipher is None:
        if not is_encrypted(stored):
            return stored
        problem = "it is encrypted, and this process has no keys; give it payloads=… with encryption"
        raise KeyMissing(name, problem, DeadLetterReason.ENCRYPTION_FAILED)
    try:
        return as_text(cipher.decrypt(facts, json.loads(stored)), name)
    except InvalidPayload as error:
        raise type(error)(_placed(error.path, name), error.problem, error.reason) from error


def _encrypted(payloads: Payloads | None, facts: PayloadFacts, plain: bytes) -> bytes:
    if (cipher := _cipher_of(payloads, facts)) is None:
        return plain
    if MARKED.search(plain) is not None:
        raise InvalidEvent("state", "it has the member $encrypted, which is reserved", "use another name")
    try:
        return as_text(cipher.encrypt(facts, json.loads(plain)), "state")
    except InvalidEvent as error:
        raise type(error)(_placed(error.path, "state"), error.problem, error.remedy) from error


def _encrypted_entry(cipher: PayloadCipher, change: SagaChange, entry: JournalEntry) -> JournalEntry:
    facts = journal_facts(change.instance.saga_id, entry.step, entry.phase, change.instance.subject)
    sealed = cipher.encrypt_whole(facts, json.loads(entry.data or "null"))
    return replace(entry, data=as_text(sealed, entry.step).decode())


def _report(cipher: PayloadCipher, message: NewSagaMessage, child: Instance) -> NewSagaMessage:
    """Return the message with the final state of a child, which its parent opens as the payload of a reply."""
    facts = PayloadFacts(message.event_id, message.name, 1, "", None, child.subject)
    return message._replace(body=as_text(cipher.encrypt_whole(facts, json.loads(child.state)), message.name))


def _cipher_of(payloads: Payloads | None, facts: PayloadFacts) -> PayloadCipher | None:
    """Return the cipher if a saga has sensitive fields."""
    cipher = payloads.encryption if payloads is not None else None
    return cipher if cipher is not None and cipher.is_sensitive(facts.event_type) else None


def _placed(path: str, name: str) -> str:
    return name + path.removeprefix("payload")
