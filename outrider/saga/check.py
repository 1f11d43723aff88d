"""What is wrong with a part of a definition, told when it is imported: every error names the line to fix, and how."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import partial
from itertools import combinations
from typing import Any

from outrider.errors import Misuse
from outrider.event import EVENT_TYPE_BYTES_MAX, TOPIC, TRACEPARENT, default_topic
from outrider.saga.steps import Function
from outrider.saga.values import shown

NAME_CHARACTERS_MAX = 200
SECONDS_MAX = 3650 * 86_400
VERSION_MAX = 2**31 - 1
GENERATOR = "has a yield in it, so that a call of it runs nothing; take the yield out"


def where() -> str:
    """Name the line that calls into this package.

    >>> where().count(":") > 0
    True
    """
    frame = sys._getframe(1)
    # A `with` enters through contextlib.
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("outrider.saga.", "contextlib")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def check_name(name: Any, what: str, line: str) -> str:
    """Refuse a name that could not be stored, or read by people.

    >>> check_name("stock.reserve", "a step", "order.py:7")
    'stock.reserve'
    """
    fine = isinstance(name, str) and name.strip() == name and name.isprintable()
    if not fine or not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise Misuse(
            f"{line}: {name!r:.80} cannot name {what}; use 1 to {NAME_CHARACTERS_MAX} printable characters without "
            "spaces around them"
        )
    return str(name)


def check_event_type(event_type: Any, line: str) -> str:
    """Refuse a type of event that could not be staged, or that no broker would deliver.

    >>> check_event_type("stock.reserve", "order.py:7")
    'stock.reserve'
    """
    name = check_name(event_type, "an event", line)
    if (size := len(name.encode())) > EVENT_TYPE_BYTES_MAX:
        raise Misuse(f"{line}: {name!r:.80} has {size} bytes; use at most {EVENT_TYPE_BYTES_MAX} for a type of event")
    return name


def check_topic(topic: Any, line: str) -> str:
    """Refuse a topic that a broker would refuse.

    >>> check_topic("stock", "order.py:7")
    'stock'
    """
    name = check_name(topic, "a topic", line)
    if not TOPIC.fullmatch(name) or name in (".", ".."):
        raise Misuse(
            f"{line}: the topic {name!r:.80} has characters a broker refuses; use letters, digits, '.', '_' and '-'"
        )
    return name


def check_reply(event_type: Any, topic: str | None, line: str) -> None:
    """Refuse an answer that could not come: by its type, or by the topic that it would come on.

    >>> check_reply("stock.reserved", None, "order.py:7")
    """
    name = check_event_type(event_type, line)
    if topic is not None:
        check_topic(topic, line)
    elif not TOPIC.fullmatch(came_on := default_topic(name, None, None)):
        raise Misuse(
            f"{line}: {name!r:.80} would come on the topic {came_on!r:.80}, which a broker refuses; use letters, "
            "digits, '.', '_' and '-', or name the topic that it comes on"
        )


def check_traceparent(traceparent: Any, line: str) -> None:
    """Refuse what is no W3C traceparent: no event of the saga could be staged with it.

    >>> check_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "starting order")
    """
    if traceparent is None or (isinstance(traceparent, str) and TRACEPARENT.fullmatch(traceparent)):
        return
    raise Misuse(
        f"{line}: {shown(traceparent)} is not a W3C traceparent; pass the header on as it came, or leave it out"
    )


def check_version(version: Any, line: str) -> int:
    """Refuse what is no version.

    >>> check_version(2, "order.py:7")
    2
    """
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise Misuse(f"{line}: version={version!r} cannot work; count versions from 1, in whole numbers")
    return version


def check_seconds(seconds: Any, name: str, line: str) -> float:
    """Refuse a time that is none.

    >>> check_seconds(30, "timeout_seconds", "order.py:7")
    30.0
    """
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= SECONDS_MAX:
        raise Misuse(
            f"{line}: {name}={shown(seconds)} cannot work; use a number above 0, at most {SECONDS_MAX} (ten years)"
        )
    return float(seconds)


def check_bare(given: Any, example: str, line: str) -> None:
    """Refuse a decorator that was given its function at once.

    >>> check_bare(None, "@order.local()", "order.py:7")
    """
    if given is not None:
        raise Misuse(f"{line}: a decorator with options takes no function itself; write {example}, with parentheses")


def check_function(function: Function, arguments: str, line: str, *, waits: bool | None = None) -> None:
    """Refuse a function that cannot take these arguments; `waits` says that it must be `async def`, or must not be."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise Misuse(f"{line}: {name} is not a function; give one that takes ({arguments})")
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise Misuse(f"{line}: {name} cannot be called with ({arguments}): {error}; let it take these") from None
    except ValueError:
        # Some that are written in C do not tell what they take.
        return
    code = _code_of(function)
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise Misuse(f"{line}: {name} {GENERATOR}")
    asynchronous = inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(function)
    if waits is False and asynchronous:
        raise Misuse(f"{line}: {name} is async, and may only compute; write def, and put what takes time into a step")
    if waits and inspect.isfunction(code) and not asynchronous:
        raise Misuse(
            f"{line}: {name} would stop all other sagas while it runs; write async def, and call what blocks with "
            "await asyncio.to_thread(…)"
        )


def _code_of(function: Any) -> Any:
    """Return the function that is run in the end, behind wrappers, partials, methods and objects that can be called.

    >>> _code_of(partial(partial(check_bare, None), "")) is check_bare
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


def distinct(names: Mapping[str, str | None], line: str) -> None:
    """Refuse types of replies that are the same: they could not be told apart, as they carry one key.

    >>> distinct({"reply": "stock.reserved", "refusal": None}, "order.py:7")
    """
    for (one, first), (other, second) in combinations(names.items(), 2):
        if first is not None and first == second:
            raise Misuse(f"{line}: {one} and {other} are both {first!r}; use a type of event for each")
