"""References to variables in a file: `${NAME}`, or `${NAME:-default}` for one that may be absent or empty.

`$${` is a `${` that refers to nothing. In the user, password or query of a URL the variable's value is percent-encoded,
so a password is given as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from outrider.errors import BadSetting

_REFERENCE = re.compile(r"(\$)?\$\{([^}]*)\}")
_INSIDE = re.compile(r"(\w+)(?::-(.*))?", re.DOTALL)


def filled(written: Any, environ: Mapping[str, str], label: str) -> Any:
    """Return a value of a file with its references filled in, at any depth.

    >>> filled({"url": "amqp://me:${PASSWORD}@mq"}, {"PASSWORD": "a/b"}, "broker")
    {'url': 'amqp://me:a%2Fb@mq'}
    """
    if isinstance(written, dict):
        return {key: filled(value, environ, f"{label}.{key}") for key, value in written.items()}
    if isinstance(written, list):
        return [filled(value, environ, label) for value in written]
    return _REFERENCE.sub(partial(_value, environ, label), written)


def _value(environ: Mapping[str, str], label: str, found: re.Match[str]) -> str:
    if found[1]:
        return found[0][1:]
    inside = _INSIDE.fullmatch(found[2])
    if inside is None:
        raise BadSetting(f"{label}: {found[0]} cannot be read; write ${{NAME}} or ${{NAME:-default}}")
    name, default = inside[1], inside[2]
    value = environ.get(name)
    if default is not None:
        value = value or default
    if value is None:
        raise BadSetting(f"{label}: the variable {name} is not set; set it, or write ${{{name}:-default}}")
    return quote(value, safe="") if _in_url(found) else value


def _in_url(found: re.Match[str]) -> bool:
    """Tell whether a reference stands where a URL needs its value encoded: in the user info, or in the query."""
    before = _REFERENCE.sub("", found.string[: found.start()]).partition("://")
    if not before[1]:
        return False
    after = _REFERENCE.sub("", found.string[found.end() :])
    return "?" in before[2] or ("/" not in before[2] and "@" in re.split(r"[/?]", after)[0])
