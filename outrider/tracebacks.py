"""The text and the traceback of an error, and its origin in the application's own code, outside of engines."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from outrider.redaction import redacted

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


def traceback_text(error: BaseException, characters_max: int = 8000) -> str:
    """Return the traceback of an error and its causes, from the application's own code on, with secrets hidden.

    The values of variables are never part of it. Of a long traceback, the beginning and the end are kept.

    >>> try:
    ...     {}["nope"]
    ... except KeyError as error:
    ...     print(traceback_text(error).splitlines()[-1])
    KeyError: 'nope'
    """
    report = traceback.TracebackException.from_exception(error, compact=True)
    _shorten(report)
    text = redacted("".join(report.format()).rstrip())
    if len(text) <= characters_max:
        return text
    head = characters_max // 4
    return f"{text[:head]}\n  [...]\n{text[len(text) - characters_max + head :]}"


def _shorten(report: traceback.TracebackException | None) -> None:
    """Drop the frames before the application's code, and make paths relative, in an error and its causes."""
    if report is None:
        return
    frames = list(report.stack)
    first = next((at for at, frame in enumerate(frames) if not frame.filename.startswith(_OTHERS)), 0)
    for frame in frames:
        frame.filename = short_path(frame.filename)
    report.stack = traceback.StackSummary.from_list(frames[first:])
    for each in (report.__cause__, report.__context__, *(report.exceptions or ())):
        _shorten(each)


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
