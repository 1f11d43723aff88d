"""What a function of a step has returned, where that tells that it did not do what its author meant."""

from __future__ import annotations

import inspect
from typing import Any

from outrider.errors import UnfitHandler

LAZY = "returned a generator, so that nothing of it has run; take the yield out"
AWAITABLE = "returned something to await, and may only compute; write def, and put what takes time into a step"
UNAWAITED = "returned a coroutine that nobody has awaited, so that nothing of it has run; write await before it"
NO_PAYLOAD = "returned None; return what the command is to carry, or {} if it carries nothing"


def ran(result: Any) -> Any:
    """Return what a function returned, unless it would run only when asked for more.

    >>> ran(5)
    5
    """
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise UnfitHandler(LAZY)
    if inspect.iscoroutine(result):
        result.close()
        raise UnfitHandler(UNAWAITED)
    return result


def computed(result: Any) -> Any:
    """Return what a function returned that computes, and waits for nothing.

    >>> computed({"order": "A-7"})
    {'order': 'A-7'}
    """
    # What `run.stage` returns can be awaited too, and has done its work.
    if inspect.iscoroutine(result):
        result.close()
        raise UnfitHandler(AWAITABLE)
    return ran(result)


def payload_of(result: Any) -> Any:
    """Return the payload that a function made; None is what one returns that has forgotten to.

    >>> payload_of({})
    {}
    """
    if computed(result) is None:
        raise UnfitHandler(NO_PAYLOAD)
    return result
