"""The object that staging, relays, consumers and sagas share: schemas, rules, upcasters and a cipher.

Checks are compiled once per event type and version. A type without schema and rules costs one look into a dictionary.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.errors import InvalidEvent, InvalidPayload, KeyMissing, SchemaUnavailable, SubjectErased, UsageError
from outrider.event import SKIPPED_TYPE, DeadLetterReason, Event, OutboxRow, subject_in, subject_of
from outrider.payload.conversion import json_parser
from outrider.payload.model import (
    OnInvalid,
    PayloadCipher,
    PayloadFacts,
    PayloadProblem,
    PayloadSchema,
    Version,
    parse_version,
)
from outrider.payload.rules import IncreasingField, Rule, treatment
from outrider.payload.schemas import Validate, accept, compile_schema, source_of
from outrider.payload.upcasters import Upcast, Upcaster, UpcasterChains
from outrider.redaction import ErrorText, Redactor
from outrider.telemetry.events import InvalidPayloadPublished, Observer, SchemaSourceUnavailable
from outrider.telemetry.log_observer import LogObserver

TypeVersion = tuple[str, object]
"""An event type, and a version as the event has it."""

UNAVAILABLE_SECONDS = 5.0
"""The time after which a source that could not be asked is asked again."""

CHECKS_MAX = 10_000
"""The most types and versions with compiled checks; event types come from other programs, too."""


@dataclass(slots=True)
class Checks:
    """The checks of one type and version. Without an error, the source has answered."""

    rules: tuple[Rule, ...]
    schema: PayloadSchema | None = None
    missing: bool = False
    error: str | None = None
    read_again_at: float = field(default=float("inf"))
    validate: Validate = field(default=accept)
    uri: str | None = None
    is_empty: bool = False
    """Whether there is nothing to check."""
    is_schema_alone: bool = False

    def __post_init__(self) -> None:
        if self.schema is not None:
            self.validate, self.uri = compile_schema(self.schema), self.schema.uri
        plain = not (self.rules or self.missing or self.error)
        self.is_empty, self.is_schema_alone = plain and self.schema is None, plain and self.schema is not None


class Payloads:
    """Schemas, rules, upcasters and encryption of payloads.

    `schemas` is a folder, a mapping, a source, or a list of these. `on_invalid` is the treatment of an invalid payload:
    `refuse` (staging raises, and a relay dead-letters the row of another program), `dead-letter` (only a relay acts) or
    `warn` (the event is published, and logged). With `schemas_required` a type without a schema is invalid, too::

        payloads = Payloads(
            schemas="schemas",
            rules=[required_fields("order.*", "order_id")],
            upcasters=[Upcaster("order.placed", 1, 2, add_currency)],
        )
        outbox = outrider.Outbox(payloads=payloads)
        relay = Relay(store, broker, payloads=payloads)
        inbox = Inbox(payloads=payloads)

    >>> Payloads(upcasters={"order.placed": {1: dict, 3: dict}})
    Traceback (most recent call last):
    ...
    outrider.errors.UsageError: order.placed version 1 does not open as the current version 4: there is no upcaster \
from version 2; add Upcaster('order.placed', 2, …)
    """

    def __init__(
        self,
        schemas: Any = None,
        *,
        on_invalid: OnInvalid | str = OnInvalid.REFUSE,
        schemas_required: bool = False,
        rules: Iterable[Rule | IncreasingField] = (),
        upcasters: Iterable[Upcaster] | Mapping[str, Mapping[int, Upcast]] = (),
        encryption: PayloadCipher | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.source = source_of(schemas)
        self.on_invalid = treatment(on_invalid)
        given = tuple(rules)
        self.increasing = tuple(rule for rule in given if isinstance(rule, IncreasingField))
        self.rules = tuple(rule.presence() if isinstance(rule, IncreasingField) else rule for rule in given)
        self.chains = UpcasterChains(upcasters)
        self.encryption = encryption
        self.observer = observer or LogObserver()
        self._required = schemas_required
        self._read_json = json_parser()
        self._checks: dict[tuple[str, str], Checks] = {}
        self._increasing: dict[str, tuple[IncreasingField, ...]] = {}
        self._loading = threading.Lock()
        if schemas_required and self.source is None:
            raise UsageError("schemas_required needs schemas; pass schemas=…")
        for event_type in self.chains.event_types:
            if self.source is None or self.source.refresh_seconds is None:
                self.chains.check(event_type, self.source.versions(event_type) if self.source else ())

    async def check(self) -> None:
        """Check at the start that every known version of each type opens as the current version.

        Versions of a source behind a network are known only here. Raises SchemaUnavailable without an answer.
        """
        await asyncio.to_thread(self._check)

    def _check(self) -> None:
        for event_type in self.chains.event_types:
            self.chains.check(event_type, self.source.versions(event_type) if self.source else ())

    @property
    def checks_at_staging(self) -> bool:
        """Return whether staging validates: a relay alone acts on an invalid payload with `dead-letter`."""
        return self.on_invalid is not OnInvalid.DEAD_LETTER or any(rule.on_invalid for rule in self.rules)

    def is_loaded(self, pair: TypeVersion) -> bool:
        """Return whether the checks of a type and version are known and fresh."""
        checks = self._checks.get(_key(*pair))
        return checks is not None and time.monotonic() < checks.read_again_at

    async def load(
        self, pairs: Iterable[TypeVersion], *, subjects: Iterable[tuple[str, str]] = (), payloads: Iterable[Any] = ()
    ) -> None:
        """Read what is not in memory, off the event loop: schemas of types and versions, and keys.

        The keys are those of subjects that are going to be staged, as (event type, subject), and those of stored or
        received payloads, as JSON text or values. An error is raised by the call that needs the schema or the key.
        """
        if wanted := [pair for pair in pairs if not self.is_loaded(pair)]:
            await asyncio.to_thread(self.load_sync, wanted)
        if self.encryption is not None:
            await self.encryption.load(subjects, payloads)

    def load_sync(self, pairs: Iterable[TypeVersion]) -> None:
        """Read schemas, and block until the source answers or its time limit is over."""
        with self._loading:
            for pair in pairs:
                if not self.is_loaded(pair):
                    if len(self._checks) >= CHECKS_MAX:
                        self._checks.clear()
                    self._checks[_key(*pair)] = self._read(*pair, self._checks.get(_key(*pair)))

    def _read(self, event_type: str, version: object, known: Checks | None) -> Checks:
        rules = tuple(rule for rule in self.rules if rule.applies_to(event_type))
        if self.source is None:
            return Checks(rules)
        now, refresh, schema = time.monotonic(), self.source.refresh_seconds, None
        try:
            if (parsed := parse_version(version)) is not None:
                schema = self.source.find(event_type, parsed)
            again = float("inf") if refresh is None else now + refresh
            return Checks(rules, schema, self._required and schema is None, read_again_at=again)
        except (SchemaUnavailable, UsageError) as error:
            self.observer.emit(SchemaSourceUnavailable(event_type, str(version), str(error)))
            if known is not None and known.error is None:
                # The last schema counts until the source answers again.
                return replace(known, read_again_at=now + UNAVAILABLE_SECONDS)
            return Checks(rules, error=str(error), read_again_at=now + UNAVAILABLE_SECONDS)

    def stage(self, facts: PayloadFacts, text: str, path: str = "payload") -> str:
        """Check a payload at staging, and return the JSON text to store, with sensitive fields encrypted.

        Raises InvalidEvent with the path of the field, and SchemaUnavailable if the schema is not known.
        """
        checks = self._of(facts) if self.checks_at_staging else None
        if self.encryption is None and (checks is None or checks.is_empty):
            return text
        payload = json.loads(text)
        if self.encryption is not None:
            # An edited dead letter may keep its encrypted values. All others would be a forgery, or a mistake.
            try:
                payload = self.encryption.decrypt(facts, payload)
            except InvalidPayload as error:
                raise InvalidEvent(_placed(error.path, path), error.problem, "stage the plain value") from error
        for problem in self._problems(facts, checks, payload) if checks else ():
            if problem.mode is OnInvalid.WARN:
                self._warn(facts, problem)
            elif problem.mode is OnInvalid.REFUSE:
                name = f"{facts.event_type} version {facts.schema_version}"
                raise InvalidEvent(_placed(problem.path, path), problem.text, f"correct the payload of {name}")
        if self.encryption is None:
            return text
        try:
            sealed = self.encryption.encrypt(facts, payload)
        except InvalidEvent as error:
            raise InvalidEvent(_placed(error.path, path), error.problem, error.remedy) from error
        return text if sealed is payload else json.dumps(sealed, ensure_ascii=False, separators=(",", ":"))

    def check_row(self, row: OutboxRow) -> str | None:
        """Check a stored event before it is published; return the URI of its schema. `load` has read the schema.

        Raises InvalidPayload with the reason of the dead letter, and SchemaUnavailable if the schema is not known.
        """
        # Without a look at the clock: `load` has just read what was too old. This runs for every event.
        checks = self._checks.get((row.event_type, str(row.schema_version)))
        if checks is not None and self.encryption is None:
            if checks.is_empty:
                return None
            if checks.is_schema_alone and checks.validate(self._parse(row.payload)) is None:
                return checks.uri
        if row.event_type == SKIPPED_TYPE:
            return None
        self.check_payload(_facts_of(row), row.payload)
        return checks.uri if checks is not None else None

    def check_payload(self, facts: PayloadFacts, text: bytes) -> None:
        """Check a stored payload, as `check_row` does."""
        checks = self._checks.get(_key(facts.event_type, facts.schema_version)) or self._of(facts)
        payload = self._parse(text)
        if self.encryption is not None:
            if plain := self.encryption.plaintext_path(facts, payload):
                problem = "it must be encrypted, and is stored as plain text"
                raise InvalidPayload(plain, problem, DeadLetterReason.ENCRYPTION_FAILED)
            try:
                payload = payload if checks.is_empty else self.encryption.decrypt(facts, payload)
            except (KeyMissing, SubjectErased):
                # A relay needs no keys: staging has checked the plain values, and an encrypted value is no secret.
                return
        for found in self._problems(facts, checks, payload):
            if found.mode is not OnInvalid.WARN:
                raise InvalidPayload(found.path, found.text, found.reason)
            self._warn(facts, found)

    def open(self, event: Event) -> Event:
        """Return an event as code of the current version reads it: decrypted, and upcast. Raises InvalidPayload."""
        given, payload = parse_version(event.schema_version) or event.schema_version, event.payload
        version: Version = given
        if self.encryption is not None:
            facts = PayloadFacts(
                event.event_id, event.event_type, version, event.topic or "", event.key, subject_of(event)
            )
            payload = self.encryption.decrypt(facts, payload)
        version, payload = self.chains.upcast(event.event_type, given, payload)
        if version == given and payload is event.payload:
            return event
        return replace(event, payload=payload, schema_version=version)

    def increasing_of(self, event_type: str) -> tuple[IncreasingField, ...]:
        """Return the increasing fields of a type."""
        if (known := self._increasing.get(event_type)) is None:
            known = tuple(rule for rule in self.increasing if rule.presence().applies_to(event_type))
            if len(self._increasing) < CHECKS_MAX:
                self._increasing[event_type] = known
        return known

    def increasing_values(self, row: OutboxRow) -> list[tuple[IncreasingField, int]]:
        """Return the increasing fields of a stored event with their values, without those that are no numbers."""
        if not (rules := self.increasing_of(row.event_type)):
            return []
        payload = self._parse(row.payload)
        if self.encryption is not None and any(rule.value(payload) is None for rule in rules):
            payload = self.encryption.decrypt(_facts_of(row), payload)
        found = ((rule, rule.value(payload)) for rule in rules)
        return [(rule, value) for rule, value in found if value is not None]

    def mode_of(self, rule: Rule | IncreasingField) -> OnInvalid:
        """Return the treatment of a rule."""
        return treatment(rule.on_invalid or self.on_invalid)

    def warn_of(self, row: OutboxRow, problem: str) -> None:
        """Emit a warning about a stored event."""
        version = str(row.schema_version)
        self.observer.emit(InvalidPayloadPublished(row.event_id, row.event_type, version, problem))

    def schema_of(self, event_type: str, version: Version) -> PayloadSchema | None:
        """Return the loaded schema of a type and version."""
        checks = self._checks.get(_key(event_type, version))
        return checks.schema if checks else None

    def _parse(self, text: bytes) -> Any:
        try:
            return self._read_json(text)
        except (ValueError, RecursionError) as error:
            problem = f"it is not JSON ({type(error).__name__})"
            raise InvalidPayload("payload", problem, DeadLetterReason.POISON_MESSAGE) from error

    def _of(self, facts: PayloadFacts) -> Checks:
        pair = facts.event_type, facts.schema_version
        if not self.is_loaded(pair):
            self.load_sync([pair])
        return self._checks[_key(*pair)]

    def _problems(self, facts: PayloadFacts, checks: Checks, payload: Any) -> Iterator[PayloadProblem]:
        if checks.error is not None and self.on_invalid is not OnInvalid.WARN:
            raise SchemaUnavailable(checks.error)
        if checks.missing:
            yield PayloadProblem("schema_version", "there is no schema for this version", self.on_invalid)
        if (found := checks.validate(payload)) is not None:
            yield PayloadProblem(found.path, found.text, self.on_invalid)
        for rule in checks.rules:
            if (broken := rule.problem(facts, payload)) is not None:
                path, text = broken
                # A rule of the application may quote the payload, and only here the payload is known as plain text.
                text = Redactor(ErrorText.REDACTED, payload).text(text)
                yield PayloadProblem(path, text, self.mode_of(rule))

    def _warn(self, facts: PayloadFacts, problem: PayloadProblem) -> None:
        version = str(facts.schema_version)
        self.observer.emit(InvalidPayloadPublished(facts.event_id, facts.event_type, version, str(problem)))


def _facts_of(row: OutboxRow) -> PayloadFacts:
    place = row.topic, row.key
    return PayloadFacts(row.event_id, row.event_type, row.schema_version, *place, subject_in(row.headers))


def _key(event_type: str, version: object) -> tuple[str, str]:
    # Stores hold a version as text, and callers give whole numbers.
    return event_type, str(version)


def _placed(path: str, prefix: str) -> str:
    """Return the path of a problem below the prefix of the event, such as `events[2].payload`.

    >>> _placed("payload.total", "events[2].payload"), _placed("schema_version", "events[2].payload")
    ('events[2].payload.total', 'events[2].schema_version')
    """
    return prefix.removesuffix("payload") + path
