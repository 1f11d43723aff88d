"""What is secret in a setting: it must not stand in a file, and it is never shown. In doubt it hides too much."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

NAMES = ("password", "passwd", "pwd", "secret", "token", "key.pem")
"""How the name of a secret ends, in a URL's query or beside it: `sasl.password`, `ssl.key.pem`."""

# Up to the last @ of the line, spaces and slashes included; an @ may also have been encoded.
_USERINFO = re.compile(r"(?<=://)([^\s/@:?]*)[:@/][^\n]*(@|%40)")
_QUERY = re.compile(rf"(?<=[?&])([\w.]*(?:{'|'.join(map(re.escape, NAMES))}))=[^\s'\")]*", re.IGNORECASE)
# A reference with a default would be a secret in the file after all.
_PLAIN_REFERENCE = re.compile(r"\$\{\w*(?::-)?\}")


def redacted(text: str) -> str:
    """Hide the passwords of every URL in a text.

    >>> redacted("postgresql://shop:s3cr/et@db/orders")
    'postgresql://shop:***@db/orders'
    """
    return _QUERY.sub(r"\1=***", _USERINFO.sub(r"\1:***\2", text))


def hidden(url: str) -> str:
    """Show a URL and all of its query but for what is secret.

    >>> hidden("kafka://b:9092?sasl.username=me&sasl.password=s3cret&linger.ms=5")
    'kafka://b:9092?sasl.username=me&sasl.password=***&linger.ms=5'
    """
    base, mark, query = url.partition("?")
    # An @ so late may be a password's, and then the question mark is too.
    if "@" in query:
        return redacted(url)
    pairs = parse_qsl(query, keep_blank_values=True)
    return redacted(base) + mark + "&".join(f"{n}={'***' if is_secret(n) else redacted(v)}" for n, v in pairs)


def is_secret(name: str) -> bool:
    """Tell whether a setting of this name is a secret.

    >>> is_secret("sasl.password"), is_secret("sasl.username")
    (True, False)
    """
    return name.lower().endswith(NAMES)


def holds_secret(written: str, name: str = "") -> bool:
    """Tell whether a value, as written in a file, spells out a secret instead of referring to a variable.

    >>> holds_secret("amqp://me:s3cret@mq"), holds_secret("amqp://me:${PASSWORD}@mq")
    (True, False)
    """
    text = _PLAIN_REFERENCE.sub("", written)
    if is_secret(name):
        return bool(text)
    _, separator, rest = text.partition("://")
    place, _, query = rest.partition("?")
    # A path has no user; everything else up to the last @ is one.
    user = "" if place.startswith("/") else place.rpartition("@")[0]
    if separator and user.partition(":")[2]:
        return True
    return any(holds_secret(value, key) for key, value in parse_qsl(query, keep_blank_values=True))
