"""CloudEvents 1.0 in binary mode: adds the CloudEvents headers to a message. No I/O.

The body and all headers of the event stay unchanged; the attributes are added with the prefix of the wire. The result
is valid for every event: an attribute without a valid value is left out, and a header of the event that a reader would
mistake for an attribute is renamed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from outrider.errors import InvalidSetting
from outrider.event import SCHEMA_HEADER, SUBJECT_HEADER, Message

SPEC_VERSION = "1.0"
JSON = "application/json"
OWN = "own_"
"""Prefix for a header of the event whose name CloudEvents uses for something else."""

CORE = ("specversion", "id", "source", "type", "time", "subject", "datacontenttype", "data")
EXTENSIONS = ("partitionkey", "sequence", "traceparent", "tracestate", "correlationid", "causationid")
TAKEN = frozenset((*CORE, *EXTENSIONS))
"""Attributes that are never taken from a header of the event with the same name."""

HARMLESS = (
    frozenset({"message_id", "event_type", "key", "sequence", "schema_version", "created_at", "skipped", "replayed"})
    | {"aggregate_type", "aggregate_id", "saga_id", "correlation_id", "causation_id", "content_type"}
    | {"trace_id", "traceparent", "tracestate", SCHEMA_HEADER, SUBJECT_HEADER}
)
"""Headers that no reader takes for an attribute. Most events have only these, and need no further check."""

COPIED = (
    ("traceparent", "traceparent"),
    ("tracestate", "tracestate"),
    ("correlationid", "correlation_id"),
    ("causationid", "causation_id"),
)
"""Extension attributes, and the headers from which the values are taken."""

SEQUENCE_DIGITS = len(str(2**63 - 1))
_UTC_TIME = re.compile(r"[0-9]{4}(?:-[0-9][0-9]){2}T[0-9][0-9](?::[0-9][0-9]){2}(?:[.][0-9]+)?[+]00:00")
_EXTENSION = re.compile(r"[a-z0-9]+")
_CHARACTER = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_URI_REFERENCE = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9+.\-]*:|(?![^/?#]*:))"  # A scheme; without one, the first segment has no colon.
    rf"(?://{_CHARACTER}*(?:\[[0-9A-Fa-f:.]+\](?::[0-9]*)?)?(?=[/?#]|\Z))?"
    rf"(?:{_CHARACTER}|/)*(?:\?(?:{_CHARACTER}|[/?])*)?(?:#(?:{_CHARACTER}|[/?])*)?"
)

_ABSOLUTE_URI = re.compile(rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{_CHARACTER}|[/?#])+")


@dataclass(frozen=True, slots=True)
class CloudEvents:
    """The CloudEvents format of one wire.

    `content_type` names the header for the content type, for a wire without a property for the purpose.

    >>> message = Message("1", "orders", "A-7", None, b"{}", {"event_type": "order.placed"})
    >>> CloudEvents("/shop/orders", "ce_").dress(message).headers["ce_subject"]
    'A-7'
    """

    source: str
    prefix: str
    content_type: str | None = None

    def __post_init__(self) -> None:
        check_source(self.source)

    def dress(self, message: Message) -> Message:
        """Return the message as a CloudEvent."""
        headers, prefix = message.headers, self.prefix
        dressed = dict(headers) if HARMLESS.issuperset(headers) else self._beside(headers)
        for name, value in attributes(message, self.source).items():
            dressed[prefix + name] = value
        if (schema := headers.get(SCHEMA_HEADER)) is not None and _ABSOLUTE_URI.fullmatch(schema):
            # A header of the event with the prefix wins.
            dressed.setdefault(prefix + SCHEMA_HEADER, schema)
        if self.content_type is not None:
            dressed[self.content_type] = headers.get("content_type") or dressed.get(self.content_type) or JSON
        return Message(*message[:5], dressed)

    def _beside(self, headers: dict[str, str]) -> dict[str, str]:
        moving = {name for name in headers.keys() - HARMLESS if not self._may_stay(name, headers[name])}
        return {OWN + name if name in moving else name: value for name, value in headers.items()}

    def _may_stay(self, name: str, value: str) -> bool:
        """Return whether a header may keep its name. CloudEvents readers compare names without case."""
        lower = name.lower()
        if lower == self.content_type:
            return name == lower
        if not lower.startswith(self.prefix):
            return True
        attribute = lower.removeprefix(self.prefix)
        extension = attribute not in TAKEN and _EXTENSION.fullmatch(attribute) is not None
        return extension and value != "" and text(value) == value


def check_source(source: str) -> None:
    """Raise an error if the text is not a valid CloudEvents source.

    >>> check_source("/shop/orders")
    """
    if not source or not _URI_REFERENCE.fullmatch(source):
        raise InvalidSetting(
            f"cloudevents = {source!r} cannot be the source of events; name your service as a URI reference, such as "
            "/shop/orders or https://shop.example/orders, with other characters percent-encoded"
        )


def attributes(message: Message, source: str) -> dict[str, str]:
    """Return the attributes of a message, without a prefix.

    An event without a key, a correlation or a cause has its own id in those fields. The repeated id carries no
    information, so only `partitionkey` keeps it: on Kafka, the key of the record is the same.

    >>> attributes(Message("1", "orders", "A", None, b"{}", {"sequence": "7"}), "/shop")["sequence"]
    '0000000000000000007'
    """
    headers, event_id, key = message.headers, message.message_id, message.key
    found = {
        "specversion": SPEC_VERSION,
        "id": event_id,
        "source": source,
        "type": headers.get("event_type") or message.topic,
    }
    if time := _time(headers.get("created_at", "")):
        found["time"] = time
    if subject := headers.get("aggregate_id") or (key if key != event_id else ""):
        found["subject"] = subject
    if key:
        found["partitionkey"] = key
    # The values are compared as text, so all have the same length.
    if (sequence := headers.get("sequence")) and sequence.isdecimal():
        found["sequence"] = sequence.zfill(SEQUENCE_DIGITS)
    for name, header in COPIED:
        if (value := headers.get(header)) and value != event_id:
            found[name] = value
    # A single check of all headers, because this code runs for every event.
    return found if "".join(found.values()).isprintable() else {name: text(found[name]) for name in found}


def text(value: str) -> str:
    """Return a text with the characters that CloudEvents forbids, such as control characters, percent-encoded.

    >>> text("naïve"), text("A\\t7")
    ('naïve', 'A%097')
    """
    return value if value.isprintable() else "".join(_escaped(c) if _forbidden(ord(c)) else c for c in value)


def _forbidden(code: int) -> bool:
    control, surrogate = code < 0x20 or 0x7F <= code < 0xA0, 0xD800 <= code < 0xE000
    return control or surrogate or 0xFDD0 <= code < 0xFDF0 or code & 0xFFFE == 0xFFFE


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode(errors="surrogatepass"))


def _time(value: str) -> str | None:
    """Return a time in RFC 3339 format, or None for a text that is not a time with a time zone."""
    try:
        at = datetime.fromisoformat(value)
        # Times from a store already have the right format. Formatting again would take half of the time spent here.
        if _UTC_TIME.fullmatch(value):
            return value[:-6] + "Z"
        return at.astimezone(UTC).isoformat()[:-6] + "Z" if at.tzinfo else None
    except (ValueError, OverflowError):
        return None
