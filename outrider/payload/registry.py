"""Schemas from an HTTP registry with the Confluent-compatible API, through a cache on disk.

A version never changes in such a registry, so a cached schema is used without asking again. That a version is absent is
kept for a minute, and counts for longer only while the registry is down.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

from outrider.errors import InvalidSetting, SchemaUnavailable, UsageError
from outrider.payload.model import PayloadSchema, Version, version_order
from outrider.payload.schemas import compile_schema, make_schema

if TYPE_CHECKING:
    from urllib.request import Request

# Every process that stages or publishes imports this module, and few of them have a registry to ask.

BYTES_MAX = 1_000_000
"""The largest reply that is read."""

ABSENT_SECONDS = 60.0

PAUSE_SECONDS = 5.0
"""The time after a failure in which the registry is not asked again: each answer would cost the whole time limit."""

ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"


class HttpReply(NamedTuple):
    """A whole reply: its status, and its body up to a limit."""

    status: int
    body: bytes


class SchemaRegistry:
    """Schemas of a registry, for `Payloads(schemas=SchemaRegistry("https://registry.example"))`.

    `credentials` is the name of an environment variable that holds `user:password`, or a bearer token. `subject` is the
    name of a type's subject. `cache` is a folder, by default below `~/.cache`; several processes may share one::

        payloads = Payloads(schemas=SchemaRegistry("https://registry.example", credentials="REGISTRY_LOGIN"))
    """

    refresh_seconds: float | None = ABSENT_SECONDS

    def __init__(
        self,
        url: str,
        *,
        credentials: str | None = None,
        subject: str = "{event_type}",
        cache: str | Path | None = None,
        timeout_seconds: float = 2.0,
    ) -> None:
        self.url = _checked_url(url)
        if "{event_type}" not in subject:
            raise InvalidSetting(f"subject={subject!r} names one subject for all types; write {{event_type}} in it")
        if not 0 < timeout_seconds <= 60:
            raise InvalidSetting(f"timeout_seconds={timeout_seconds!r} cannot work; use a number above 0, up to 60")
        self._credentials, self._subject, self._timeout_seconds = credentials, subject, timeout_seconds
        folder = Path(cache) if cache else Path.home() / ".cache" / "outrider" / "schemas"
        self._folder = folder / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._ask_again_at = float("-inf")
        self._error = ""
        self._authorization()

    def find(self, event_type: str, version: Version) -> PayloadSchema | None:
        name = f"{event_type} version {version}"
        if isinstance(version, str):
            raise UsageError(f"{name}: a registry has whole numbers only; give the event a number as its version")
        path = f"/subjects/{quote(self._subject.format(event_type=event_type), safe='')}/versions/{version}"
        kept = self._read_cache(path)
        if kept is not None and (kept["document"] is not None or time.time() - kept["at"] < ABSENT_SECONDS):
            return self._schema(event_type, version, kept["document"], path)
        try:
            document = self._fetch(name, path)
        except SchemaUnavailable:
            if kept is not None:
                # The registry has said that there is none, and nothing newer is known.
                return None
            raise
        self._write_cache(path, document)
        return self._schema(event_type, version, document, path)

    def versions(self, event_type: str) -> Sequence[Version]:
        path = f"/subjects/{quote(self._subject.format(event_type=event_type), safe='')}/versions"
        found = self._ask(path)
        numbers = [] if found is None else found
        if not isinstance(numbers, list) or not all(type(number) is int and number > 0 for number in numbers):
            raise self._unusable(path, "has no list of numbers")
        return sorted(numbers, key=version_order)

    def event_types(self) -> Sequence[str]:
        before, _, after = self._subject.partition("{event_type}")
        subjects = self._ask("/subjects")
        if not isinstance(subjects, list) or not all(isinstance(subject, str) for subject in subjects):
            raise self._unusable("/subjects", "has no list of subjects")
        whole = (subject for subject in subjects if subject.startswith(before) and subject.endswith(after))
        return sorted(subject[len(before) : len(subject) - len(after)] for subject in whole)

    def _schema(self, event_type: str, version: Version, document: Any, path: str) -> PayloadSchema | None:
        return None if document is None else make_schema(event_type, version, document, self.url + path)

    def _fetch(self, name: str, path: str) -> Any:
        """Return the document of a version, None if the registry has none."""
        found = self._ask(path)
        if found is None:
            return None
        if not isinstance(found, Mapping) or not isinstance(found.get("schema"), str):
            raise self._unusable(path, "has no text `schema`")
        if (kind := found.get("schemaType", "AVRO")) != "JSON":
            raise UsageError(f"{name}: the registry has a schema of the type {kind!s:.20}; register a JSON Schema")
        if found.get("references"):
            raise UsageError(f"{name}: the schema refers to other subjects; register it in one document")
        try:
            document = json.loads(found["schema"])
        except (ValueError, RecursionError) as error:
            raise self._unusable(path, "has a `schema` that is not JSON") from error
        compile_schema(make_schema(name.partition(" ")[0], int(name.rpartition(" ")[2]), document))
        return document

    def _ask(self, path: str) -> Any:
        """Return the JSON of a reply, None for 404. Raises SchemaUnavailable for everything else."""
        if time.monotonic() < self._ask_again_at:
            raise SchemaUnavailable(self._error)
        try:
            reply = self._get(path)
        except (OSError, ValueError, TimeoutError) as error:
            raise self._failed(path, f"does not answer ({_reason(error)})") from error
        if reply.status == HTTPStatus.NOT_FOUND:
            return None
        if reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise self._failed(
                path, f"refuses the credentials ({reply.status}); check the variable {self._credentials}"
            )
        if reply.status != HTTPStatus.OK:
            raise self._failed(path, f"answers {reply.status}")
        if len(reply.body) > BYTES_MAX:
            raise self._failed(path, f"answers with more than {BYTES_MAX} bytes")
        try:
            return json.loads(reply.body)
        except (ValueError, RecursionError) as error:
            raise self._unusable(path, "is not JSON") from error

    def _get(self, path: str) -> HttpReply:
        """Send one request, with a limit for the whole reply: a socket's own limit starts anew with every byte.

        The thread of a reply that never ends stays behind, until its socket does.
        """
        from urllib.request import Request

        request = Request(self.url + path, headers={"Accept": ACCEPT})  # noqa: S310 - the scheme is checked
        if (authorization := self._authorization()) is not None:
            # A redirect must not take the credentials to another host.
            request.add_unredirected_header("Authorization", authorization)
        results: queue.SimpleQueue[HttpReply | Exception] = queue.SimpleQueue()
        work = threading.Thread(target=_send, args=(request, self._timeout_seconds, results), daemon=True)
        work.start()
        try:
            result = results.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise TimeoutError(f"no whole reply within {self._timeout_seconds:g} s") from None
        if isinstance(result, Exception):
            raise result
        return result

    def _authorization(self) -> str | None:
        if self._credentials is None:
            return None
        if not (secret := os.environ.get(self._credentials, "").strip()):
            raise InvalidSetting(
                f"credentials={self._credentials!r} names a variable that is not set; set user:password or a token"
            )
        return f"Basic {base64.b64encode(secret.encode()).decode()}" if ":" in secret else f"Bearer {secret}"

    def _failed(self, path: str, problem: str) -> SchemaUnavailable:
        self._error = (
            f"the schema registry {self.url} {problem}, asked for {path}, and no schema is cached in {self._folder}; "
            "check the registry"
        )
        self._ask_again_at = time.monotonic() + PAUSE_SECONDS
        return SchemaUnavailable(self._error)

    def _unusable(self, path: str, problem: str) -> SchemaUnavailable:
        return self._failed(path, f"gives a reply that {problem}")

    def _file(self, path: str) -> Path:
        return self._folder / f"{hashlib.sha256(path.encode()).hexdigest()}.json"

    def _read_cache(self, path: str) -> dict[str, Any] | None:
        """Return what is cached for a path, None for nothing or a broken file."""
        try:
            kept = json.loads(self._file(path).read_text(encoding="utf-8"))
            known = {"path": kept["path"], "document": kept["document"], "at": float(kept["at"])}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return known if known["path"] == path else None

    def _write_cache(self, path: str, document: Any) -> None:
        """Replace the file as a whole, since other processes read it. A full or read-only disk costs only the cache."""
        import tempfile

        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False, encoding="utf-8") as file:
                json.dump({"path": path, "document": document, "at": time.time()}, file)
            Path(file.name).replace(self._file(path))


def _send(request: Request, seconds: float, results: queue.SimpleQueue[HttpReply | Exception]) -> None:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        with urlopen(request, timeout=seconds) as response:  # noqa: S310 - the scheme is checked
            results.put(HttpReply(response.status, response.read(BYTES_MAX + 1)))
    except HTTPError as error:
        with error:
            results.put(HttpReply(error.code, b""))
    except Exception as error:
        # Whatever a client or a broken reply raises: the caller decides.
        results.put(error if isinstance(error, OSError | ValueError) else ValueError(type(error).__name__))


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return str(reason) or type(error).__name__


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidSetting("the URL of a schema registry starts with https:// or http://, and names a host")
    if "@" in parts.netloc:
        raise InvalidSetting(
            "the URL of the schema registry holds credentials; keep them in the environment, and pass "
            "credentials='THE_VARIABLE'"
        )
    return url.rstrip("/")
