"""Checks of the parts of a definition at import time. Each error names the line to fix and a remedy."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any
from uuid import UUID

from outrider.errors import UsageError
from outrider.event import EVENT_TYPE_BYTES_MAX, TOPIC, TRACEPARENT, default_topic, subject_problem
from outrider.payload.conversion import is_object_id
from outrider.saga.state.types import shown

NAME_CHARACTERS_MAX = 200

SECONDS_MAX = 3650 * 86_400

VERSION_MAX = 2**31 - 1

GENERATOR = "has a yield in it, so that a call of it runs nothing; take the yield out"

Function = Callable[..., Any]


def definition_site() -> str:
    """Return the source line that calls into this package.

    >>> definition_site().count(":") > 0
    True
    """
    frame = sys._getframe(1)
    # A `with` statement enters through contextlib.
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("outrider.saga.", "contextlib")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def check_name(name: Any, what: str, line: str) -> str:
    """Reject a name that is too long, blank or not printable.

    >>> check_name("stock.reserve", "a step", "order.py:7")
    'stock.reserve'
    """
    fine = isinstance(name, str) and name.strip() == name and name.isprintable()
    if not fine or not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise UsageError(
            f"{line}: {name!r:.80} cannot name {what}; use 1 to {NAME_CHARACTERS_MAX} printable characters without "
            "spaces around them"
        )
    return str(name)


def check_event_type(event_type: Any, line: str) -> str:
    """Reject an event type that cannot be staged or delivered.

    >>> check_event_type("stock.reserve", "order.py:7")
    'stock.reserve'
    """
    name = check_name(event_type, "an event", line)
    if (size := len(name.encode())) > EVENT_TYPE_BYTES_MAX:
        raise UsageError(
            f"{line}: {name!r:.80} has {size} bytes; use at most {EVENT_TYPE_BYTES_MAX} for a type of event"
        )
    return name


def check_topic(topic: Any, line: str) -> str:
    """Reject a topic that a broker would reject.

    >>> check_topic("stock", "order.py:7")
    'stock'
    """
    name = check_name(topic, "a topic", line)
    if not TOPIC.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"{line}: the topic {name!r:.80} has characters that brokers reject; use letters, digits, '.', '_' and '-'"
        )
    return name


def check_reply(event_type: Any, topic: str | None, line: str) -> None:
    """Reject a reply with an invalid type or on an invalid topic.

    >>> check_reply("stock.reserved", None, "order.py:7")
    """
    name = check_event_type(event_type, line)
    if topic is not None:
        check_topic(topic, line)
    elif not TOPIC.fullmatch(reply_topic := default_topic(name, None, None)):
        raise UsageError(
            f"{line}: {name!r:.80} would come on the topic {reply_topic!r:.80}, which brokers reject; use letters, "
            "digits, '.', '_' and '-', or name the topic that it comes on"
        )


def check_traceparent(traceparent: Any, line: str) -> None:
    """Reject an invalid W3C traceparent, which would prevent the saga from staging events.

    >>> check_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "starting order")
    """
    if traceparent is None or (isinstance(traceparent, str) and TRACEPARENT.fullmatch(traceparent)):
        return
    raise UsageError(
        f"{line}: {shown(traceparent)} is not a W3C traceparent; pass the header on unchanged, or leave it out"
    )


def check_version(version: Any, line: str) -> int:
    """Reject an invalid version.

    >>> check_version(2, "order.py:7")
    2
    """
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise UsageError(f"{line}: version={version!r} cannot work; count versions from 1, in whole numbers")
    return version


def check_seconds(seconds: Any, name: str, line: str) -> float:
    """Reject an invalid duration.

    >>> check_seconds(30, "timeout_seconds", "order.py:7")
    30.0
    """
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= SECONDS_MAX:
        raise UsageError(
            f"{line}: {name}={shown(seconds)} cannot work; use a number above 0, at most {SECONDS_MAX} (ten years)"
        )
    return float(seconds)


def check_saga_subject(subject: Any, line: str) -> str:
    """Return the subject of a saga as text. Reject one with which the saga could stage no event.

    >>> check_saga_subject(42, "starting order")
    '42'
    """
    if isinstance(subject, bool) or not (isinstance(subject, str | int | UUID) or is_object_id(subject)):
        raise UsageError(f'{line}: {shown(subject)} is no subject; pass the id of a person, such as "customer:42"')
    if problem := subject_problem(str(subject)):
        raise UsageError(f"{line}: the subject cannot be used: {problem}")
    return str(subject)


def check_parentheses(given: Any, example: str, line: str) -> None:
    """Reject a decorator that is used without parentheses.

    >>> check_parentheses(None, "@order.local()", "order.py:7")
    """
    if given is not None:
        raise UsageError(
            f"{line}: a decorator with options takes no function itself; write {example}, with parentheses"
        )


def check_function(function: Function, arguments: str, line: str, *, is_async: bool | None = None) -> None:
    """Reject a function that cannot take the arguments. `is_async` requires or forbids `async def`."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise UsageError(f"{line}: {name} is not a function; give one that takes ({arguments})")
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise UsageError(f"{line}: {name} cannot be called with ({arguments}): {error}; let it take these") from None
    except ValueError:
        # Some functions written in C have no signature.
        return
    code = _code_of(function)
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise UsageError(f"{line}: {name} {GENERATOR}")
    asynchronous = inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(function)
    if is_async is False and asynchronous:
        raise UsageError(f"{line}: {name} is async, and may only compute; write def, and move slow work into a step")
    if is_async and inspect.isfunction(code) and not asynchronous:
        raise UsageError(
            f"{line}: {name} would stop all other sagas while it runs; write async def, and call what blocks with "
            "await asyncio.to_thread(…)"
        )


def _code_of(function: Any) -> Any:
    """Return the underlying function of wrappers, partials, methods and callable objects.

    >>> _code_of(partial(partial(check_parentheses, None), "")) is check_parentheses
    True
    """
    function = inspect.unwrap(function)
    if isinstance(function, partial):
        return _code_of(function.func)
    if inspect.ismethod(function):
        return _code_of(function.__func__)
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    return inspect.unwrap(type(function).__call__)


def check_distinct(names: Mapping[str, str | None], line: str) -> None:
    """Reject equal event types: their replies have the same key and could not be distinguished.

    >>> check_distinct({"reply": "stock.reserved", "rejection": None}, "order.py:7")
    """
    for (one, first), (other, second) in combinations(names.items(), 2):
        if first is not None and first == second:
            raise UsageError(f"{line}: {one} and {other} are both {first!r}; use a type of event for each")
