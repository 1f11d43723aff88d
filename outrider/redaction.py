"""Redaction: secrets are kept out of files, and values of payloads out of the texts of errors.

In doubt, too much is hidden. The text of an error is redacted once, by the engine or adapter that takes the text from
the exception or the broker, because only there the payload is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus

NAMES = ("password", "passwd", "pwd", "secret", "token", "key.pem")
"""Endings of the names of secrets, in the query of a URL or beside the URL: `sasl.password`, `ssl.key.pem`."""

# Up to the last @ of the line, spaces and slashes included; an @ may also have been encoded.
_USERINFO = re.compile(r"(?<=://)([^\s/@:?]*)[:@/][^\n]*(@|%40)")
_QUERY = re.compile(rf"(?<=[?&])([\w.]*(?:{'|'.join(map(re.escape, NAMES))}))=[^\s'\")]*", re.IGNORECASE)
# A reference with a default would be a secret in the file after all.
_PLAIN_REFERENCE = re.compile(r"\$\{\w*(?::-)?\}")

MASK = "***"

VALUE_CHARACTERS_MIN = 4
"""The length from which a value of a payload is masked: shorter values, such as EUR, occur in any text."""

BEGINNING_CHARACTERS_MIN = 12
"""The length from which the beginning of a value is masked, because a program has cut the value off."""

TEXT_CHARACTERS_MAX = 4000
"""The characters of a text that are looked at; of a longer text, the beginning and the end are kept."""

SOURCE_BYTES_MAX = 16 * 2**20
"""The JSON text that is searched for values; with more, only codes of an error text are kept."""

TECHNICAL_HEADERS = frozenset(
    {
        *("message_id", "event_type", "topic", "key", "band", "sequence", "gapless", "replayed", "skipped"),
        *(
            "schema_version",
            "created_at",
            "aggregate_type",
            "aggregate_id",
            "correlation_id",
            "causation_id",
            "dataschema",
        ),
        *("trace_id", "traceparent", "tracestate", "saga_id", "saga_key", "saga_phase", "saga_answered"),
        *("dataschema", "content-type", "content_type"),
    }
)
"""Headers whose values describe the message. The values of all other headers are masked."""


def redacted(text: str) -> str:
    """Hide the passwords of every URL in a text.

    >>> redacted("postgresql://shop:s3cr/et@db/orders")
    'postgresql://shop:***@db/orders'
    """
    return _QUERY.sub(r"\1=***", _USERINFO.sub(r"\1:***\2", text))


def hidden(url: str) -> str:
    """Return a URL with the secrets of its query hidden.

    >>> hidden("kafka://b:9092?sasl.username=me&sasl.password=s3cret&linger.ms=5")
    'kafka://b:9092?sasl.username=me&sasl.password=***&linger.ms=5'
    """
    base, mark, query = url.partition("?")
    # An @ after the question mark may be part of a password, and so may the question mark.
    if "@" in query:
        return redacted(url)
    pairs = parse_qsl(query, keep_blank_values=True)
    return redacted(base) + mark + "&".join(f"{n}={'***' if is_secret(n) else redacted(v)}" for n, v in pairs)


def is_secret(name: str) -> bool:
    """Tell whether the name of a setting is the name of a secret.

    >>> is_secret("sasl.password"), is_secret("sasl.username")
    (True, False)
    """
    return name.lower().endswith(NAMES)


def has_secret(written: str, name: str = "") -> bool:
    """Tell whether a value in a file holds a secret instead of a reference to a variable.

    >>> has_secret("amqp://me:s3cret@mq"), has_secret("amqp://me:${PASSWORD}@mq")
    (True, False)
    """
    text = _PLAIN_REFERENCE.sub("", written)
    if is_secret(name):
        return bool(text)
    _, separator, rest = text.partition("://")
    authority, _, query = rest.partition("?")
    # A path has no user; everything else up to the last @ is one.
    user = "" if authority.startswith("/") else authority.rpartition("@")[0]
    if separator and user.partition(":")[2]:
        return True
    return any(has_secret(value, key) for key, value in parse_qsl(query, keep_blank_values=True))


class ErrorText(StrEnum):
    """The part of an error's text that is logged and stored.

    `full`: all of it, except passwords in URLs. `redacted`: all of it, except values of the payload, personal data and
    secrets. `type`: only codes, and the names of known errors.
    """

    FULL = "full"
    REDACTED = "redacted"
    TYPE = "type"


class Redactor:
    """Redacts the texts of errors. The values in `sources` are masked wherever they occur.

    A source is a value as JSON has them, or JSON text as bytes. Sources are read when the first text is redacted.

    >>> Redactor(ErrorText.REDACTED, {"card": "4000-1234"}).text("no such card: 4000-1234")
    'no such card: ***'
    """

    def __init__(self, keep: ErrorText = ErrorText.REDACTED, *sources: Any) -> None:
        self.keep, self._sources = keep, sources

    def text(self, text: str) -> str:
        """Return the part of a text that may be kept."""
        if self.keep is ErrorText.FULL:
            return redacted(text)
        masked = _masked_patterns(redacted(self._masked_values(_shortened(text))))
        # Once more: a mask and the characters beside it may spell a value.
        masked = self._masked_values(masked)
        return _codes(masked) if self.keep is ErrorText.TYPE or self._is_too_large else masked

    def _masked_values(self, text: str) -> str:
        """Mask values until none is left. Every mask is shorter than the value, so the loop ends."""
        while True:
            folded = _folded(text)
            cuts = list(_CUTS.finditer(folded))
            spans = [span for form in self._forms for span in _spans(folded, form, cuts)]
            if not spans:
                return text
            text = _replaced(text, spans)

    @property
    def _is_too_large(self) -> bool:
        return sum(len(source) for source in self._sources if isinstance(source, bytes)) > SOURCE_BYTES_MAX

    @cached_property
    def _forms(self) -> frozenset[str]:
        if self._is_too_large:
            return frozenset()
        return frozenset(_folded(form) for value in _values(self._sources) for form in _forms(value))


UNREDACTED = Redactor(ErrorText.FULL)
"""For a text that becomes part of another error, which is redacted by the engine that knows the payload."""


def without_values(error: object) -> str:
    """Return the text of an error of a driver or server, without the values that such texts quote.

    >>> without_values("DETAIL:  Key (email)=(jane@example.com) already exists.")
    'DETAIL:  Key (email)=(***) already exists.'
    """
    return Redactor().text(str(error))


def header_values(headers: Mapping[str, Any] | bytes) -> list[Any]:
    """Return the values of headers that the application has set; the others describe the message.

    >>> header_values({"traceparent": "00-7", "tenant": "acme"})
    ['acme']
    """
    found = _parsed(headers) if isinstance(headers, bytes) else headers
    return [value for name, value in found.items() if name not in TECHNICAL_HEADERS] if _is_mapping(found) else []


def masked_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers with the values that the application has set masked.

    >>> masked_headers({"traceparent": "00-7", "tenant": "acme"})
    {'traceparent': '00-7', 'tenant': '***'}
    """
    return {name: value if name in TECHNICAL_HEADERS else MASK for name, value in headers.items()}


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _parsed(text: bytes) -> Any:
    """Return the value of JSON text, or the text itself if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode(errors="replace")


def _values(sources: Iterable[Any]) -> Iterator[str]:
    """Yield the texts and numbers in the sources that are long enough, and keys that are no names of fields."""
    left = list(sources)
    while left:
        found = left.pop()
        if isinstance(found, bytes):
            left.append(_parsed(found))
        elif isinstance(found, Mapping):
            left += found.values()
            left += (key for key in found if isinstance(key, str) and not _FIELD.fullmatch(key))
        elif isinstance(found, list | tuple | set | frozenset):
            left += found
        elif found is not None and not isinstance(found, bool) and len(text := str(found)) >= VALUE_CHARACTERS_MIN:
            yield text


def _forms(value: str) -> Iterable[str]:
    """Return the forms in which programs write a value: as it is, and escaped for Python, JSON, both, SQL and URLs."""
    if value.isascii() and value.isalnum():
        return (value,)
    written = value.encode(errors="replace")
    forms = {
        value,
        value.strip(),
        " ".join(value.split()),
        repr(value)[1:-1],
        repr(written)[2:-1],
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(json.dumps(value))[2:-2],
        json.dumps(json.dumps(value))[3:-3],
        value.replace("'", "''"),
        quote(written),
        quote(written, safe=""),
        quote_plus(written),
    }
    return [form for form in forms if len(form) >= VALUE_CHARACTERS_MIN]


def _folded(text: str) -> str:
    """Return a text in lower case, with as many characters: some letters become two in lower case."""
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := character.lower()) == 1 else character for character in text)


def _spans(text: str, form: str, cuts: Iterable[re.Match[str]]) -> Iterator[tuple[int, int]]:
    """Yield the places of a value in a text: of all of it, of its beginning, and of its ends beside an ellipsis."""
    beginning = form[:BEGINNING_CHARACTERS_MIN]
    start = text.find(beginning)
    while start >= 0:
        end = start + len(beginning)
        while end < len(text) and end - start < len(form) and text[end] == form[end - start]:
            end += 1
        yield start, end
        start = text.find(beginning, start + 1)
    for cut in cuts:
        before, after = cut.start(), cut.end()
        start = text.find(form[:VALUE_CHARACTERS_MIN], max(0, before - len(form)), before)
        while start >= 0 and not form.startswith(text[start:before]):
            start = text.find(form[:VALUE_CHARACTERS_MIN], start + 1, before)
        if start >= 0:
            yield start, before
        end = text.rfind(form[-VALUE_CHARACTERS_MIN:], after, after + len(form))
        while end >= 0 and not form.endswith(text[after : end + VALUE_CHARACTERS_MIN]):
            end = text.rfind(form[-VALUE_CHARACTERS_MIN:], after, end + VALUE_CHARACTERS_MIN - 1)
        if end >= 0:
            yield after, end + VALUE_CHARACTERS_MIN


def _replaced(text: str, spans: list[tuple[int, int]]) -> str:
    """Return a text with one mask for every group of spans that touch."""
    parts: list[str] = []
    done = -1
    for start, end in sorted(spans):
        if start > done:
            parts += (text[max(done, 0) : start], MASK)
        done = max(done, end)
    return "".join(parts) + text[done:]


def _shortened(text: str) -> str:
    if len(text) <= TEXT_CHARACTERS_MAX:
        return text
    end = TEXT_CHARACTERS_MAX // 4
    return f"{text[: TEXT_CHARACTERS_MAX - end]}[...]{text[-end:]}"


def _masked_patterns(text: str) -> str:
    """Mask values that servers and libraries quote in known places, and what looks like personal data or a secret."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _codes(text: str) -> str:
    """Return the codes and the known words in a text.

    >>> _codes("Broker: Message size too large (MSG_SIZE_TOO_LARGE) for jane")
    'too large, MSG_SIZE_TOO_LARGE'
    """
    return ", ".join(dict.fromkeys(_CODE.findall(text))) or NOT_KEPT


def _masked_detail(found: re.Match[str]) -> str:
    # The names of columns stand before the values; in other languages than English, only the brackets are the same.
    line = found.group()
    if ")=(" in line:
        return re.sub(r"\)=\(.*\)", f")=({MASK})", line, flags=re.DOTALL)
    return re.sub(r"(Token )\".*?\"", rf'\1"{MASK}"', re.sub(r"\(.*\)", f"({MASK})", line, flags=re.DOTALL))


def _masked_document(found: re.Match[str]) -> str:
    return found.group(1) + re.sub(r'(: )("(?:[^"\\]|\\.)*"|[^,{}]+)', rf"\1{MASK}", found.group(2))


def _masked_quotes(found: re.Match[str]) -> str:
    return re.sub(r"'[^']*'", f"'{MASK}'", found.group())


def _masked_card(found: re.Match[str]) -> str:
    """Mask a number with the check digit of payment cards; other long numbers are offsets and times.

    >>> [_CARD.sub(_masked_card, text) for text in ("4111 1111 1111 1111", "4111 1111 1111 1112")]
    ['***', '4111 1111 1111 1112']
    """
    digits = [int(character) for character in found.group() if character.isdigit()]
    doubled = (2 * digit - 9 * (digit > 4) for digit in digits[-2::-2])
    return MASK if (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 else found.group()


NOT_KEPT = "(text not kept)"

_CUTS = re.compile(r"\[?(?:\.{3,}|\u2026)\]?")
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_CODE = re.compile(
    r"\b_?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\b[A-Z]\w*(?:Error|Exception|Timeout|Failure)\b|"
    r"[\w./-]+\.py:\d+ in \w+|no answer|timed out|refused|unreachable|reset by peer|closed|denied|not found|"
    r"too large|duplicate key|deadlock"
)
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])")
_JSON_VALUE = r"""(?:'[^\n]*'|"[^\n]*"|\{[^\n]*\}|\[[^\n]*\]|-?\d[\d.eE+-]*)"""

# No pattern may start anew at each character of a long run, or a text could block the process.
_PATTERNS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # PostgreSQL and its drivers.
    (re.compile(r"DETAIL:.*?(?=\n(?:HINT|CONTEXT|QUERY|\[SQL)\b|\Z)", re.DOTALL), _masked_detail),
    (re.compile(r"(?<=CONTEXT:)[^\n]*"), _masked_quotes),
    (re.compile(r"(\b(?:data|COPY \w+), line \d+[^:\n]{0,99}: )[^\n]*"), rf"\1{MASK}"),
    (re.compile(r"(\bLINE \d+: )[^\n]*"), rf"\1{MASK}"),
    (re.compile(r"(\bquery argument \$\d+[^:\n]{0,99}: )[^\n]*?(?= \([^()\n]*\)$|$)", re.MULTILINE), rf"\1{MASK}"),
    (re.compile(r'(\b(?:invalid|malformed|date/time)[^:"\n]{0,99}: )"[^\n]*"'), rf'\1"{MASK}"'),
    (re.compile(r'(\bvalue )"[^"\n]*"'), rf'\1"{MASK}"'),
    # SQLAlchemy, MongoDB.
    (re.compile(r"\[SQL: .*?\](?=\n|\Z)", re.DOTALL), _masked_quotes),
    (re.compile(r"\[parameters: .*?\](?=\n\(|\s*\Z)", re.DOTALL), f"[parameters: {MASK}]"),
    (re.compile(r"(dup key: )(\{[^\n]*\})"), _masked_document),
    (re.compile(r", full error: .*", re.DOTALL), ""),
    # pydantic, jsonschema.
    (re.compile(r"(\binput_value=)[^\n]*(?=, input_type=)"), rf"\1{MASK}"),
    (re.compile(r"^On instance.*", re.DOTALL | re.MULTILINE), f"On instance: {MASK}"),
    (
        re.compile(
            _JSON_VALUE + r"(?= (?:is not (?:of type|one of|valid|a multiple|a ')|does not match|is too (?:long|short)|"
            r"was expected|is (?:less|greater) than|has non-unique))"
        ),
        MASK,
    ),
    # Secrets.
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL), MASK),
    (
        re.compile(
            r"(?<![\w.-])([\w.-]*(?:password|passwd|pwd|secret|token|api[_-]?key|credentials?|authorization)"
            r"[\"']?\s*[=:]\s*)(?:(?:bearer|basic|digest)\s+)?(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&)\]}]+)",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"\b(bearer|basic)\s+(?=\S*[\d=])[\w+/=.~-]{8,}", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+(?:\.[\w-]*)?"), MASK),
    (re.compile(r"\b(?:AKIA[A-Z0-9]{16}|(?:sk|pk|rk|ghp|gho|xox[a-z])[_-][\w-]{10,})"), MASK),
    (re.compile(r"(?<![\w+])(?=[\w+]*[A-Z])(?=[\w+]*[a-z])(?=[\w+]*\d)[\w+]{40,}={0,2}"), MASK),
    # Personal data.
    (re.compile(r"(?<![\w.+%-])[\w.+%-]+@[\w-]+(?:\.[\w-]+)+"), MASK),
    (re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"), MASK),
    (_CARD, _masked_card),
    (re.compile(r"(?<![\w+])\+\d[\d ()./-]{6,20}\d"), MASK),
    (re.compile(r"\b\d{3}-\d{2}-\d{4}\b"), MASK),
)
