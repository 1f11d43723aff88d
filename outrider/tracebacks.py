"""The text and the traceback of an error, and its origin in the application's own code, outside of engines."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from outrider.redaction import Redactor, redacted

_CODE = re.compile(r"[A-Z0-9_]{1,40}")
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


def traceback_text(error: BaseException, redactor: Redactor, characters_max: int = 8000) -> str:
    """Return the traceback of an error and its causes, from the application's own code on, with redacted texts.

    The values of variables are never part of it. Of a long traceback, the beginning and the end are kept.

    >>> try:
    ...     {}["nope"]
    ... except KeyError as error:
    ...     print(traceback_text(error, Redactor()).splitlines()[-1])
    KeyError: 'nope'
    """
    report = traceback.TracebackException.from_exception(error, compact=True)
    _shorten(report, redactor)
    text = redacted("".join(report.format()).rstrip())
    if len(text) <= characters_max:
        return text
    head = characters_max // 4
    return f"{text[:head]}\n  [...]\n{text[len(text) - characters_max + head :]}"


def _shorten(report: traceback.TracebackException | None, redactor: Redactor) -> None:
    """Drop the frames before the application's code, make paths relative and redact texts, in an error and its causes.

    Places and lines of code are kept as they are: the values of a payload may be words of the code.
    """
    if report is None:
        return
    frames = list(report.stack)
    first = next((at for at, frame in enumerate(frames) if not frame.filename.startswith(_OTHERS)), 0)
    for frame in frames:
        frame.filename = short_path(frame.filename)
    report.stack = traceback.StackSummary.from_list(frames[first:])
    # A SyntaxError has its text in `msg`, and shows the line that could not be read.
    for name in ("_str", "msg", "text"):
        if text := getattr(report, name, None):
            setattr(report, name, redactor.text(str(text)))
    if notes := getattr(report, "__notes__", None):
        report.__notes__ = [redactor.text(str(note)) for note in notes]
    for each in (report.__cause__, report.__context__, *(report.exceptions or ())):
        _shorten(each, redactor)


def summary_of(error: BaseException, redactor: Redactor) -> str:
    """Return the type of an error, the code of a database or broker, and the redacted text.

    >>> summary_of(ValueError("no such order"), Redactor())
    'ValueError: no such order'
    """
    kind, code, text = type(error).__name__, code_of(error), text_of(error, redactor)
    named = f"{kind} [{code}]" if code else kind
    return f"{named}: {text}" if text else named


def text_of(error: BaseException, redactor: Redactor) -> str:
    """Return the redacted text of an error, even if the error's `__str__` raises.

    >>> text_of(ValueError("no such order"), Redactor())
    'no such order'
    """
    try:
        texts = [str(error), *map(str, getattr(error, "__notes__", []))]
    except Exception as trouble:
        return f"(its text cannot be read: {type(trouble).__name__})"
    # One by one: the masked rest of a server's text must not take the notes with it.
    return "; ".join(dict.fromkeys(redactor.text(text) for text in texts if text))


def code_of(error: BaseException) -> str:
    """Return the SQLSTATE or the code of a database or broker, of an error or of the error that it wraps.

    >>> code_of(ValueError("7"))
    ''
    """
    for each in (error, getattr(error, "orig", None)):
        for name in ("sqlstate", "pgcode", "sqlite_errorname", "code"):
            code = getattr(each, name, None)
            # A code of the application may be a value, and a number is a code of a server.
            if isinstance(code, int if name == "code" else str) and code and _CODE.fullmatch(str(code)):
                return "" if isinstance(each, SystemExit) else str(code)
    return ""


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
