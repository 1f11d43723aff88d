"""Redaction: secrets are kept out of files, and hidden in output and stored errors. In doubt, too much is hidden."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

NAMES = ("password", "passwd", "pwd", "secret", "token", "key.pem")
"""Endings of the names of secrets, in the query of a URL or beside the URL: `sasl.password`, `ssl.key.pem`."""

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
