"""The text of an error, and its origin in the application's own code, outside of libraries and engines."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parent
_OTHERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(
        str(_PACKAGE / name)
        for name in ("inbox", "saga", "stores", "codec", "cli", "outbox", "drivers", "app.py", "adapters.py")
    ),
)


def user_frame(error: BaseException) -> str | None:
    """Return the last line of the application's code in the traceback of an error.

    >>> try:
    ...     {}["nope"]
    ... except KeyError as error:
    ...     print(user_frame(error))
    <doctest outrider.tracebacks.user_frame[0]>:2 in <module>
    """
    for each in _chain(error):
        for frame in reversed(traceback.extract_tb(each.__traceback__)):
            if not frame.filename.startswith(_OTHERS):
                return f"{short_path(frame.filename)}:{frame.lineno} in {frame.name}"
    return None


def text_of(error: BaseException) -> str:
    """Return the text of an error, even if the error's `__str__` raises.

    >>> text_of(ValueError("no such order"))
    'no such order'
    """
    try:
        return "; ".join([str(error), *getattr(error, "__notes__", [])])
    except Exception as trouble:
        return f"(its text cannot be read: {type(trouble).__name__})"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; only the cause shows where a cancelled handler was interrupted."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup):
            yield from _chain(error.exceptions[0])
        error = error.__cause__ or error.__context__


def short_path(path: str) -> str:
    """Return a path relative to the working directory, if inside.

    >>> short_path(os.path.join(os.getcwd(), "shop.py"))
    'shop.py'
    """
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
