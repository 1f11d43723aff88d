"""Keys that come from outside: which texts cannot be the key of a step, so that no store is ever asked to keep them."""

from __future__ import annotations

KEY_BYTES_MAX = 1000
"""More than a saga's id and the longest name of a step need, and less than an index can hold."""


def unfit_key(key: str) -> str | None:
    """Say why a text can be the key of no step; None if it can.

    >>> unfit_key("x" * 2000)
    'is longer than 1000 bytes'
    """
    if "\0" in key or any("\ud800" <= character <= "\udfff" for character in key):
        return "has a NUL or half a character in it"
    if len(key.encode()) > KEY_BYTES_MAX:
        return f"is longer than {KEY_BYTES_MAX} bytes"
    return None
