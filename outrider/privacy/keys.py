"""The key ring: keys of AES-256 by id, one of which is active and encrypts; all others still decrypt.

A ring reads a source: an environment variable, a file, or the table of a store. The text of a ring is a list of
`id:base64` entries, separated by spaces, commas or lines. The first entry is the active key.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from outrider.errors import KeysUnavailable, UsageError

KEY_BYTES = 32

KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

REFRESH_SECONDS = 60.0
"""The age after which a ring is read again, in the background."""

PAUSE_SECONDS = 5.0
"""The time after which a source is asked again for a key that it did not have, or after a failure."""

MISSING_MAX = 1_000
"""The most ids of missing keys that are remembered; ids come from other programs, too."""

EXAMPLE = "outrider keys new"

SUBJECT_KEY_ID = re.compile(r"s-[0-9a-f]{16}")
"""The id of the key of a subject. It is random: an id says nothing about its subject."""

_IN_TEXT = re.compile(rb'"(s-[0-9a-f]{16})"')


@dataclass(frozen=True, slots=True)
class DataKey:
    """A key of AES-256 and its id. The id is no secret: every encrypted value names the id of its key.

    >>> DataKey("2026-11", bytes(32))
    DataKey(id='2026-11')
    """

    id: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not KEY_ID.fullmatch(self.id):
            raise UsageError("the id of a key has letters, digits, '.', '_' and '-' only, at most 64")
        if len(self.secret) != KEY_BYTES:
            raise UsageError(f"the key {self.id} has {len(self.secret)} bytes, not {KEY_BYTES}; run: {EXAMPLE}")

    @classmethod
    def new(cls, key_id: str | None = None) -> DataKey:
        """Make a random key. The default id is the day with a few random digits."""
        return cls(key_id or f"{datetime.now(UTC):%Y-%m-%d}-{secrets.token_hex(3)}", secrets.token_bytes(KEY_BYTES))

    @property
    def text(self) -> str:
        """Return the entry of a ring, which is secret."""
        return f"{self.id}:{base64.b64encode(self.secret).decode()}"


class KeySet(NamedTuple):
    """The keys of a ring by id, and the id of the active key (None: there is no key to encrypt with)."""

    keys: Mapping[str, DataKey]
    active: str | None


class KeyFacts(NamedTuple):
    """A key as an operator sees it, without its secret. Times and names are known only in a store."""

    id: str
    active: bool
    created_at: datetime | None = None
    created_by: str | None = None
    activated_at: datetime | None = None
    activated_by: str | None = None
    master: str | None = None
    """The id of the master key that wraps the key."""


class KeySource(Protocol):
    """A place that holds the keys of a ring."""

    where: str
    """The place, for texts of errors."""

    def read(self) -> KeySet:
        """Return all keys, empty if the place does not exist. Raises KeysUnavailable, and UsageError for a bad text.

        The method may block.
        """
        ...

    async def facts(self) -> list[KeyFacts]:
        """Return all keys as an operator sees them, the active key first."""
        ...

    async def add(self, key: DataKey, actor: str) -> bool:
        """Add a key, which decrypts, and encrypts if it is the first; return False if the id is taken."""
        ...

    async def activate(self, key_id: str, actor: str) -> bool:
        """Let a key encrypt from now on; return False if there is no key with this id."""
        ...


class SubjectKey(NamedTuple):
    """The key of a subject as a process knows it. Without `key` it was destroyed, or `problem` has the reason."""

    id: str
    subject: str
    key: DataKey | None
    problem: str = ""
    destroyed_at: datetime | None = None


class SubjectKeySource(Protocol):
    """The keys of subjects: each person has a key, which can be destroyed with all that it has encrypted."""

    where: str
    """The place, for texts of errors."""

    def key_of(self, subject: str) -> DataKey | None:
        """Return the key that encrypts for a subject, made at the first use; None where there are no secrets.

        The method blocks unless `load` has read the key. Raises KeysUnavailable.
        """
        ...

    def find(self, key_id: str) -> SubjectKey | None:
        """Return a key by its id, None if it is unknown. The method may block, as `key_of`. Raises KeysUnavailable."""
        ...

    async def load(self, subjects: Iterable[str], key_ids: Iterable[str]) -> None:
        """Read keys that are not in memory, and make those that subjects lack, while the event loop goes on."""
        ...


def subject_key_ids(payload: bytes) -> set[str]:
    """Return the ids of keys of subjects in the JSON text of a payload, perhaps with other texts of that form.

    >>> subject_key_ids(b'{"email": {"$encrypted": 1, "key": "s-0123456789abcdef"}}')
    {'s-0123456789abcdef'}
    """
    return {found.decode("ascii") for found in _IN_TEXT.findall(payload)} if b'"s-' in payload else set()


class EnvironmentKeys:
    """The keys in an environment variable. A variable that is not set holds no keys.

    >>> os.environ["EXAMPLE_KEYS"] = "new:" + "A" * 43 + "= old:" + "B" * 43 + "="
    >>> EnvironmentKeys("EXAMPLE_KEYS").read().active
    'new'
    """

    def __init__(self, variable: str) -> None:
        if not variable or variable.startswith("OUTRIDER_"):
            raise UsageError(f"{variable!r} cannot hold keys: OUTRIDER_… are settings; name it SHOP_KEYS, for example")
        self.variable, self.where = variable, f"the environment variable {variable}"

    def read(self) -> KeySet:
        return parse_keys(os.environ.get(self.variable, ""), self.where)

    async def facts(self) -> list[KeyFacts]:
        return facts_of(self.read())

    async def add(self, key: DataKey, actor: str) -> bool:
        raise self._fixed("append it to the variable where you set it")

    async def activate(self, key_id: str, actor: str) -> bool:
        raise self._fixed("put its entry first where you set the variable")

    def _fixed(self, remedy: str) -> UsageError:
        return UsageError(f"{self.where} cannot be changed from here; make a key with `{EXAMPLE}`, and {remedy}")


class FileKeys:
    """The keys in a file that only its owner may read. A file that does not exist holds no keys.

    Commands write the file under a lock, in one step, so that no reader sees half a ring.

    >>> FileKeys("absent.keys").read()
    KeySet(keys={}, active=None)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.where = f"the file {self.path}"

    def read(self) -> KeySet:
        try:
            return parse_keys(self.path.read_text(encoding="utf-8"), self.where)
        except FileNotFoundError:
            return KeySet({}, None)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise KeysUnavailable(f"the keys in {self.where} cannot be read ({reason}); check the file") from error

    async def facts(self) -> list[KeyFacts]:
        return facts_of(self.read())

    async def add(self, key: DataKey, actor: str) -> bool:
        with self._locked():
            known = self.read()
            if key.id not in known.keys:
                self._write([*known.keys.values(), key])
            return key.id not in known.keys

    async def activate(self, key_id: str, actor: str) -> bool:
        with self._locked():
            known = self.read()
            if key_id in known.keys:
                self._write(sorted(known.keys.values(), key=lambda key: key.id != key_id))
            return key_id in known.keys

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            folder = os.open(self.path.absolute().parent, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"cannot write {self.path} ({error.strerror}); check the folder") from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _write(self, keys: Iterable[DataKey]) -> None:
        try:
            # A temporary file is readable by its owner only.
            handle, name = tempfile.mkstemp(dir=self.path.absolute().parent, prefix=f".{self.path.name}.")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(f"{key.text}\n" for key in keys)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except OSError as error:
            raise UsageError(f"cannot write {self.path} ({error.strerror}); check the folder and its rights") from error


class KeyRing:
    """The keys of a source, read at the first use and again each minute.

    While the source cannot be read, the keys of the last reading count::

        keys = KeyRing.from_environment("SHOP_KEYS")
        keys = KeyRing.from_file("/run/secrets/shop-keys")

    >>> KeyRing(EnvironmentKeys("ABSENT_KEYS")).find("2026-11") is None
    True
    """

    def __init__(self, source: KeySource) -> None:
        self.source = source
        self._known: KeySet | None = None
        self._read_at = self._failed_at = float("-inf")
        self._error = ""
        self._missing: dict[str, float] = {}
        self._asking = threading.Lock()

    @classmethod
    def from_environment(cls, variable: str) -> KeyRing:
        """Return the ring of an environment variable. A text that is no ring is a usage error at once."""
        return cls._checked(EnvironmentKeys(variable))

    @classmethod
    def from_file(cls, path: str | Path) -> KeyRing:
        """Return the ring of a file. A text that is no ring is a usage error at once."""
        return cls._checked(FileKeys(path))

    @classmethod
    def _checked(cls, source: KeySource) -> KeyRing:
        ring = cls(source)
        ring.reload()
        return ring

    @property
    def where(self) -> str:
        """Return the place of the keys, for texts of errors."""
        return self.source.where

    def active(self) -> DataKey | None:
        """Return the key that encrypts, None if there is no key. Raises KeysUnavailable if no keys were ever read."""
        known = self._current()
        if known.active is None and time.monotonic() - self._read_at >= PAUSE_SECONDS:
            known = self._ask()
        return None if known.active is None else known.keys[known.active]

    def find(self, key_id: str) -> DataKey | None:
        """Return a key by its id, None if the source has none. Raises KeysUnavailable if the source cannot be asked.

        The source is asked again for an unknown id, because another process may have rotated.
        """
        key = self._current().keys.get(key_id)
        if key is None and time.monotonic() - self._missing.get(key_id, float("-inf")) >= PAUSE_SECONDS:
            key = self._ask().keys.get(key_id)
            if key is None:
                if len(self._missing) >= MISSING_MAX:
                    self._missing.clear()
                self._missing[key_id] = time.monotonic()
        return key

    def reload(self) -> KeySet:
        """Read the source now, wait for the answer, and return the keys."""
        self._known = known = self.source.read()
        self._read_at = time.monotonic()
        return known

    def _current(self) -> KeySet:
        known = self._known
        if known is None:
            return self._ask()
        if time.monotonic() - max(self._read_at, self._failed_at) >= REFRESH_SECONDS and not self._asking.locked():
            # On a thread of its own: an event loop may be waiting for this call.
            threading.Thread(target=self._refresh, name="outrider-key-refresh", daemon=True).start()
        return known

    def _refresh(self) -> None:
        with suppress(KeysUnavailable):
            self._ask()

    def _ask(self) -> KeySet:
        with self._asking:
            # A source that has just failed would cost each caller its whole time limit.
            if time.monotonic() - self._failed_at < PAUSE_SECONDS:
                raise KeysUnavailable(self._error)
            try:
                return self.reload()
            except (KeysUnavailable, UsageError) as error:
                self._failed_at, self._error = time.monotonic(), str(error)
                raise KeysUnavailable(self._error) from error


def parse_keys(text: str, where: str) -> KeySet:
    """Return the keys of a text. An error names the entry by its number, and never repeats it.

    >>> parse_keys("2026-11:c2hvcnQ=", "the file shop.keys")
    Traceback (most recent call last):
    ...
    outrider.errors.UsageError: the file shop.keys: entry 1 is no key (not 32 bytes of base64); make one with: \
outrider keys new
    """
    keys: dict[str, DataKey] = {}
    for number, entry in enumerate(re.split(r"[\s,]+", text.strip()) if text.strip() else (), start=1):
        key_id, _, encoded = entry.partition(":")
        problem = None if KEY_ID.fullmatch(key_id) else "an id has letters, digits, '.', '_' and '-', at most 64"
        secret = _decoded(encoded)
        if len(secret) != KEY_BYTES:
            problem = problem or f"not {KEY_BYTES} bytes of base64"
        if problem is None and key_id in keys:
            problem = "its id is there twice"
        if problem is not None:
            raise UsageError(f"{where}: entry {number} is no key ({problem}); make one with: {EXAMPLE}")
        keys[key_id] = DataKey(key_id, secret)
    return KeySet(keys, next(iter(keys), None))


def _decoded(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        return b""


def facts_of(known: KeySet) -> list[KeyFacts]:
    """Return keys as an operator sees them, in the order of the ring."""
    return [KeyFacts(key_id, key_id == known.active) for key_id in known.keys]
