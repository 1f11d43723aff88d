"""Field encryption: sensitive fields of payloads as AES-256-GCM, each value with its key id and its own random nonce.

An encrypted value is an object `{"$encrypted": 1, "key": ..., "nonce": ..., "data": ...}`; 1 is the version of its
form. The associated data binds the id and the type of the event and the path of the field, so that a value which was
copied to another event or field does not open. The package `cryptography` is imported with the first key.
"""

from __future__ import annotations

import binascii
import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from outrider.errors import ActiveKeyMissing, InvalidEvent, InvalidPayload, KeyMissing, SubjectErased, UsageError
from outrider.event import DeadLetterReason, erased_name
from outrider.payload.conversion import json_parser
from outrider.payload.model import ENCRYPTED_MARK, REPLY, SAGA_JOURNAL, SAGA_STATE, PayloadFacts, field_path
from outrider.privacy.keys import KEY_ID, SUBJECT_KEY_ID, DataKey, KeyRing, SubjectKeySource, subject_key_ids

MARK = ENCRYPTED_MARK

FORM = 1
"""The version of the form of encrypted values."""

NONCE_BYTES, TAG_BYTES = 12, 16

EACH = "[*]"
"""The part of a path for the items of a list."""

EVERY = "*"
"""The part of a path for the members of an object."""

CONTAINERS = (dict, list)

MEMBERS = frozenset({MARK, "key", "nonce", "data"})

Parts = tuple[str | int, ...]
"""The names and numbers that lead to a field."""

Fields = dict[str, Any]
"""The sensitive fields below a place, by part of the path; an empty mapping is a sensitive field."""


class EncryptedValue(NamedTuple):
    """An encrypted value in its parts."""

    key_id: str
    nonce: bytes
    data: bytes

    def to_json(self) -> dict[str, Any]:
        """Return the object that stands in the payload."""
        nonce, data = binascii.b2a_base64(self.nonce, newline=False), binascii.b2a_base64(self.data, newline=False)
        return {MARK: FORM, "key": self.key_id, "nonce": nonce.decode("ascii"), "data": data.decode("ascii")}


class FieldEncryption:
    """Encrypts the sensitive fields of event types, for `Payloads(encryption=...)`.

    `sensitive` maps an event type, or a prefix such as `order.*`, to paths: names with dots between them, `[*]` for the
    items of a list, `*` for all members of an object. `sagas` maps types of sagas to paths in their states::

        encryption = FieldEncryption(
            keys=KeyRing.from_environment("SHOP_KEYS"),
            sensitive={"order.placed": ["customer.email", "items[*].note"]},
            sagas={"order": ["customer.email"]},
        )
        outbox = outrider.Outbox(payloads=Payloads(encryption=encryption))

    With `subjects`, the fields of an event that has a subject are encrypted with the subject's own key, which can be
    destroyed.

    >>> FieldEncryption(keys=KeyRing.from_environment("ABSENT_KEYS"), sensitive={"order.placed": ["customer..email"]})
    Traceback (most recent call last):
    ...
    outrider.errors.UsageError: order.placed: 'customer..email' is no path; write names with dots between them, and \
[*] for the items of a list
    """

    def __init__(
        self,
        *,
        keys: KeyRing,
        sensitive: Mapping[str, Sequence[str]],
        sagas: Mapping[str, Sequence[str]] = MappingProxyType({}),
        subjects: SubjectKeySource | None = None,
    ) -> None:
        self.keys, self.subjects = keys, subjects
        self._read_json = json_parser()
        self._prefixes: list[tuple[str, list[Parts]]] = []
        for beginning, given in (("", sensitive), (SAGA_STATE, sagas)):
            for name, paths in given.items():
                if not name or "*" in name[:-1] or isinstance(paths, str):
                    raise UsageError(
                        f"{'sagas' if beginning else 'sensitive'}={{{name!r}: …}} cannot work; map a type, or a prefix "
                        "such as order.*, to a list of paths"
                    )
                self._prefixes.append((beginning + name, [_parse_path(name, path) for path in paths]))
        self._fields: dict[str, Fields] = {}

    async def load(self, subjects: Iterable[tuple[str, str]], payloads: Iterable[Any]) -> None:
        """Read the keys of subjects, as (event type, subject), and of payloads, as JSON text or values."""
        if self.subjects is not None:
            named = {subject for event_type, subject in subjects if self._has_secrets(event_type)}
            found = (subject_key_ids(each) if isinstance(each, bytes) else self.key_ids(each) for each in payloads)
            key_ids = {key_id for ids in found for key_id in ids if SUBJECT_KEY_ID.fullmatch(key_id)}
            await self.subjects.load(named, key_ids)

    def encrypt(self, facts: PayloadFacts, payload: Any) -> Any:
        """Return the payload with its sensitive fields encrypted. Raises InvalidEvent if a field cannot be."""
        fields = self._of(facts.event_type)
        if not fields:
            return payload
        key: DataKey | None = None

        def seal(value: Any, parts: Parts) -> Any:
            nonlocal key
            # Only the first field asks the ring, which looks at the clock.
            key = key or self._present_key(facts, parts)
            return self._seal(key, facts, parts, value)

        def misplaced(parts: Parts, text: str) -> None:
            raise InvalidEvent(_shown(parts), text, "correct the payload, or the paths of `sensitive`")

        return _change_fields(fields, payload, (), seal, misplaced)

    def encrypt_whole(self, facts: PayloadFacts, payload: Any) -> Any:
        """Return the payload as one encrypted value, whatever its sensitive fields are."""
        return self._seal(self._present_key(facts, ()), facts, (), payload)

    def _has_secrets(self, event_type: str) -> bool:
        """Return whether values of a type are encrypted; data of a journal are, if there are any."""
        return bool(self._of(event_type)) or event_type.startswith(SAGA_JOURNAL)

    def is_sensitive(self, event_type: str) -> bool:
        """Return whether a type has sensitive fields."""
        return bool(self._of(event_type))

    def decrypt(self, facts: PayloadFacts, payload: Any) -> Any:
        """Return the payload with every encrypted value as its plain value.

        Raises InvalidPayload for a value that is damaged or belongs elsewhere, KeyMissing without its key, and
        SubjectErased if its key was destroyed.
        """
        try:
            return _change_encrypted(payload, (), lambda value, parts: self._open(facts, parts, value))
        except RecursionError as error:
            text = "it is nested too deeply"
            raise InvalidPayload("payload", text, DeadLetterReason.POISON_MESSAGE) from error

    def plaintext_path(self, facts: PayloadFacts, payload: Any) -> str | None:
        """Return the path of a stored field that must be encrypted and is not; None if there is no such field."""
        found: list[Parts] = []

        def look(value: Any, parts: Parts) -> Any:
            if not _is_whole(value):
                found.append(parts)
            return value

        fields = self._of(facts.event_type)
        if fields:
            _change_fields(fields, payload, (), look, lambda parts, _: found.append(parts))
        return _shown(found[0]) if found else None

    def is_current(self, facts: PayloadFacts, text: str) -> bool:
        """Return whether `reencrypt` would leave a stored payload as it is. Raises InvalidPayload as `decrypt` does."""
        payload = json.loads(text)
        if self.plaintext_path(facts, payload) is not None:
            self.decrypt(facts, payload)
            return False

        def look(value: dict[str, Any], parts: Parts) -> Any:
            return value if self._is_present(facts, parts, value) else self._open(facts, parts, value)

        return _change_encrypted(payload, (), look) is payload

    def reencrypt(self, facts: PayloadFacts, text: str) -> str | None:
        """Return the JSON text of a stored payload with all sensitive fields under their present key; None if they are.

        That is the active key of the ring, or the key of the subject. Other parts of the text stay as they are,
        character by character, unless a field was not encrypted.
        """
        payload = json.loads(text)
        if self.plaintext_path(facts, payload) is not None:
            whole = self.encrypt(facts, self.decrypt(facts, payload))
            return _compact(whole)
        if (self.subjects is None or facts.subject is None) and self.keys.active() is None:
            raise UsageError(f"{self.keys.where} has no key; make one with: outrider keys add")
        fresh: list[tuple[str, str]] = []

        def renew(value: dict[str, Any], parts: Parts) -> Any:
            if self._is_present(facts, parts, value):
                return value
            # The old key first: a destroyed key must not make a new one.
            plain = self._open(facts, parts, value)
            where, key = self._encrypting_key(facts)
            if key is None:
                raise UsageError(f"{where} has no key; make one with: outrider keys add")
            sealed = self._seal(key, facts, parts, plain)
            fresh.append((_compact(value), _compact(sealed)))
            return sealed

        changed = _change_encrypted(payload, (), renew)
        if changed is payload:
            return None
        if all(text.count(before) == 1 for before, _ in fresh):
            for before, after in fresh:
                text = text.replace(before, after)
            return text
        return _compact(changed)

    def _is_present(self, facts: PayloadFacts, parts: Parts, value: dict[str, Any]) -> bool:
        """Return whether a value has the key that would encrypt it now."""
        key_id = str(value.get("key"))
        if self.subjects is None or not SUBJECT_KEY_ID.fullmatch(key_id):
            active = self.keys.active() if self.subjects is None or facts.subject is None else None
            return active is not None and active.id == key_id
        # A subject has one live key. A reply in a mailbox has no headers, so that its subject is unknown there.
        if facts.subject is not None:
            self._subject_key(facts, parts, key_id)
        return True

    def key_ids(self, payload: Any) -> set[str]:
        """Return the ids of the keys of all encrypted values in a payload."""
        found: set[str] = set()

        def look(value: dict[str, Any], parts: Parts) -> Any:
            found.add(str(value.get("key")))
            return value

        _change_encrypted(payload, (), look)
        return found

    def _present_key(self, facts: PayloadFacts, parts: Parts) -> DataKey:
        where, key = self._encrypting_key(facts)
        if key is None:
            remedy = "make a key with `outrider keys new`, or stage where the keys are"
            raise ActiveKeyMissing(_shown(parts), f"it must be encrypted, and {where} has no key", remedy)
        return key

    def _seal(self, key: DataKey, facts: PayloadFacts, parts: Parts, value: Any) -> dict[str, Any]:
        plain = _compact(value).encode("utf-8", "surrogatepass")
        return seal_bytes(key, plain, _associated(key.id, facts, parts)).to_json()

    def _open(self, facts: PayloadFacts, parts: Parts, value: dict[str, Any]) -> Any:
        sealed = parse_encrypted(value)
        if sealed is None:
            text = "it is no whole encrypted value"
            if not _has_form(value):
                text = f"it has the member {MARK}, which is reserved, in a form that this version does not know"
            raise _invalid(parts, text)
        if self.subjects is not None and SUBJECT_KEY_ID.fullmatch(sealed.key_id):
            key = self._subject_key(facts, parts, sealed.key_id)
        elif (found := self.keys.find(sealed.key_id)) is not None:
            key = found
        else:
            raise _missing(parts, sealed.key_id, f"which {self.keys.where} does not have")
        plain = open_bytes(key, sealed, _associated(key.id, facts, parts))
        if plain is None:
            raise _invalid(
                parts, f"it does not open with the key {key.id}: it was changed, or belongs to another event or field"
            )
        try:
            return self._read_json(plain)
        except UnicodeDecodeError:
            # A lone surrogate, which only the standard library reads.
            return json.loads(plain)

    def _encrypting_key(self, facts: PayloadFacts) -> tuple[str, DataKey | None]:
        """Return the place of the key that encrypts the fields of an event, and the key if it is there."""
        if self.subjects is not None and facts.subject is not None:
            return self.subjects.where, self.subjects.key_of(facts.subject)
        return self.keys.where, self.keys.active()

    def _subject_key(self, facts: PayloadFacts, parts: Parts, key_id: str) -> DataKey:
        """Return the key of the subject of an event, which decrypts a field."""
        assert self.subjects is not None
        found = self.subjects.find(key_id)
        if found is None:
            raise _missing(parts, key_id, f"which {self.subjects.where} does not have")
        if facts.subject is not None and found.subject not in (facts.subject, erased_name(facts.subject)):
            raise _invalid(parts, f"it is encrypted with the key {key_id} of another subject than that of the event")
        if found.destroyed_at is not None:
            text = f"its subject was erased: the key {key_id} was destroyed on {found.destroyed_at:%Y-%m-%d}"
            raise SubjectErased(_shown(parts), text, DeadLetterReason.ENCRYPTION_FAILED)
        if found.key is None:
            raise _missing(parts, key_id, f"the key of a subject, which cannot be used: {found.problem}")
        return found.key

    def _of(self, event_type: str) -> Fields:
        """Return the sensitive fields of a type. Types come from other programs, too, so the memory is bounded."""
        if (found := self._fields.get(event_type)) is None:
            found = {}
            wanted = event_type.removeprefix(REPLY)
            for pattern, paths in self._prefixes:
                beginning = pattern[:-1] if pattern.endswith("*") else None
                same_kind = wanted.startswith("\0") is pattern.startswith("\0")
                if pattern == wanted or (same_kind and beginning is not None and wanted.startswith(beginning)):
                    for parts in paths:
                        _merge(found, _nested(parts))
            _spread(found)
            if found and wanted is not event_type:
                found = {"reply": {"payload": found}}
            if len(self._fields) >= 10_000:
                self._fields.clear()
            self._fields[event_type] = found
        return found


def _parse_path(event_type: str, path: str) -> Parts:
    """Return the parts of a path.

    >>> _parse_path("order.placed", "items[*].note")
    ('items', '[*]', 'note')
    """
    parts = path.replace(EACH, f".{EACH}").removeprefix(".").split(".")
    if any(not part or (part != EACH and ("[" in part or "]" in part)) for part in parts):
        raise UsageError(
            f"{event_type}: {path!r} is no path; write names with dots between them, and [*] for the items of a list"
        )
    return tuple(parts)


def _nested(parts: Parts) -> Fields:
    """Return a path as nested fields.

    >>> _nested(("items", "[*]", "note"))
    {'items': {'[*]': {'note': {}}}}
    """
    fields: Fields = {}
    for part in reversed(parts):
        fields = {str(part): fields}
    return fields


def _merge(fields: Fields, others: Fields) -> None:
    """Add other fields. A field below a sensitive field adds nothing, and a field above replaces those below.

    >>> fields = {"customer": {"email": {}}}
    >>> _merge(fields, {"customer": {"name": {}}})
    >>> fields
    {'customer': {'email': {}, 'name': {}}}
    """
    for part, below in others.items():
        known = fields.get(part)
        if known is None or not below:
            fields[part] = copy.deepcopy(below)
        elif known:
            _merge(known, below)


def _spread(fields: Fields) -> None:
    """Let the paths of every member hold for the members with paths of their own, too."""
    for part, below in fields.items():
        if part not in (EACH, EVERY) and EVERY in fields and below:
            if fields[EVERY]:
                _merge(below, fields[EVERY])
            else:
                fields[part] = {}
        _spread(fields[part])


def _change_fields(
    fields: Fields,
    value: Any,
    parts: Parts,
    change: Callable[[Any, Parts], Any],
    misplaced: Callable[[Parts, str], None],
) -> Any:
    """Return a value with its sensitive fields changed; the same object if nothing changed.

    A value that is neither null nor what the path expects is misplaced: a sensitive value may be in it.
    """
    if value is None:
        return value
    changed = value
    for part, below in fields.items():
        places = _places(fields, part, value)
        if places is None:
            kind = "list" if part == EACH else "object"
            misplaced(parts, f"it is no {kind}, and a sensitive field is expected in one")
        for place in places or ():
            item, place_parts = value[place], (*parts, place)
            after = _change_fields(below, item, place_parts, change, misplaced) if below else change(item, place_parts)
            if after is not item:
                changed = value.copy() if changed is value else changed
                changed[place] = after
    return changed


def _places(fields: Fields, part: str, value: Any) -> Sequence[Any] | None:
    """Return the numbers or names in a value that a part of a path means; None if the value is of another kind."""
    if part == EACH:
        return range(len(value)) if isinstance(value, list) else None
    if not isinstance(value, dict):
        return None
    if part == EVERY:
        return [name for name in value if name not in fields]
    return (part,) if part in value else ()


def _change_encrypted(value: Any, parts: Parts, change: Callable[[dict[str, Any], Parts], Any]) -> Any:
    """Return a value with its encrypted values changed; the same object if nothing changed."""
    if isinstance(value, dict):
        if MARK in value:
            return change(value, parts)
        members: Any = value.items()
    elif isinstance(value, list):
        members = enumerate(value)
    else:
        return value
    changed = value
    for place, item in members:
        if isinstance(item, CONTAINERS):
            after = _change_encrypted(item, (*parts, place), change)
            if after is not item:
                changed = value.copy() if changed is value else changed
                changed[place] = after
    return changed


def seal_bytes(key: DataKey, plain: bytes, associated: bytes) -> EncryptedValue:
    """Encrypt bytes with a fresh random nonce."""
    nonce = os.urandom(NONCE_BYTES)
    return EncryptedValue(key.id, nonce, _cipher(key.secret).encrypt(nonce, plain, associated))


def open_bytes(key: DataKey, sealed: EncryptedValue, associated: bytes) -> bytes | None:
    """Decrypt bytes; None if they were changed, or were encrypted with other associated data or another key."""
    try:
        plain: bytes = _cipher(key.secret).decrypt(sealed.nonce, sealed.data, associated)
    except _invalid_tag():
        return None
    return plain


def parse_encrypted(value: Any) -> EncryptedValue | None:
    """Return the parts of an encrypted value, None for anything else.

    An object with another member is none: a plain value could hide in it.
    """
    if not isinstance(value, dict) or value.keys() != MEMBERS or not _has_form(value):
        return None
    key, nonce, data = value["key"], _bytes(value["nonce"]), _bytes(value["data"])
    if not isinstance(key, str) or not _is_key_id(key):
        return None
    return EncryptedValue(key, nonce, data) if len(nonce) == NONCE_BYTES and len(data) > TAG_BYTES else None


@lru_cache(maxsize=256)
def _is_key_id(text: str) -> bool:
    return KEY_ID.fullmatch(text) is not None


def _has_form(value: dict[str, Any]) -> bool:
    return value[MARK] == FORM and not isinstance(value[MARK], bool)


def _is_whole(value: Any) -> bool:
    return parse_encrypted(value) is not None


def _bytes(text: Any) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return b""


def _associated(key_id: str, facts: PayloadFacts, parts: Parts) -> bytes:
    beginning = _associated_event(key_id, facts.event_id, facts.event_type)
    return f"{beginning}{_associated_path(parts)}".encode()


@lru_cache(maxsize=16)
def _associated_event(key_id: str, event_id: UUID | None, event_type: str) -> str:
    """Return the beginning of a JSON list, which is the same for all fields of an event."""
    return f'["outrider", {FORM}, {_quoted(key_id)}, "{event_id}", {_quoted(event_type)}'


_quoted = lru_cache(maxsize=256)(json.dumps)


@lru_cache(maxsize=256)
def _associated_path(parts: Parts) -> str:
    """Return the end of that list."""
    return "".join(f", {json.dumps(part)}" for part in parts) + "]"


_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Encodes a value as JSON without spaces. `json.dumps` with these options would make an encoder for each value."""


def _shown(parts: Parts) -> str:
    return field_path("payload", parts)


def _missing(parts: Parts, key_id: str, which: str) -> KeyMissing:
    text = f"it is encrypted with the key {key_id}, {which}"
    return KeyMissing(_shown(parts), text, DeadLetterReason.ENCRYPTION_FAILED)


def _invalid(parts: Parts, text: str) -> InvalidPayload:
    return InvalidPayload(_shown(parts), text, DeadLetterReason.ENCRYPTION_FAILED)


@lru_cache(maxsize=256)
def _cipher(secret: bytes) -> Any:
    """Return the cipher of a key, or say how to install the package."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as error:
        raise UsageError("encryption needs cryptography; run: pip install 'outrider[encryption]'") from error
    return AESGCM(secret)


def _invalid_tag() -> type[Exception]:
    """Return the error of a value that does not open. An import costs as much as opening a value."""
    from cryptography.exceptions import InvalidTag

    return InvalidTag
