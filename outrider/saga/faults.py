"""What is wrong with a step's code: exceptions become results, in words that say where they came from.

- `Refused`, or any `Permanent`: it did not happen and will not.
- What no store may be given, or no transaction be done to: the code is at fault, and would be the next time too.
- Anything else: it broke.
"""

from __future__ import annotations

import traceback
from typing import Any

from outrider.errors import InvalidEvent, Misuse, Permanent, UnfitHandler
from outrider.observer import SagaStepRaised
from outrider.saga.errors import BadState, Refused
from outrider.saga.news import Absorb, Call, Declined, Local, Raised, Result, Send, TimedOut, Unfit
from outrider.saga_store import Instance
from outrider.where import short_path, text_of, where

RAISED = (Exception, SystemExit, KeyboardInterrupt, BaseExceptionGroup)
"""What somebody's code may raise. Neither of the two that would end a process does so from inside a step."""

TEXT_CHARACTERS_MAX = 700
"""Less than a line of the journal holds, so that the place is never cut off."""

UNFIT = (InvalidEvent, UnfitHandler, BadState)

Step = Call | Local | Send | Absorb


def failure(move: Step, error: BaseException, *, late: bool = False) -> Result:
    """Say what an exception means: it did not happen and will not, it broke, or nobody knows."""
    if isinstance(error, UNFIT):
        return unfit(move, error)
    if isinstance(error, Permanent):
        return Declined(move.step, move.phase, told(move, error))
    if late:
        return TimedOut(move.step, move.phase)
    return Raised(move.step, move.phase, told(move, error), reply=isinstance(move, Absorb))


def unfit(move: Step, error: BaseException) -> Unfit:
    """Say that the state, or what was staged, is at fault; it would be the next time, too."""
    return Unfit(move.step, move.phase, told(move, error))


def told(move: Step, error: BaseException) -> str:
    """Say what broke, in which function of the step, and where.

    >>> from outrider.saga_store import Phase
    >>> told(Call("charge", Phase.ACTION, 1, "key"), ValueError("no such card"))
    'ValueError: no such card'
    """
    text = described(error)
    # A refusal is what the author has to say, and not an error.
    return text if isinstance(error, Refused) else f"{_function(move)}{text}"


def described(error: BaseException) -> str:
    """Say what an error is, and where it came from.

    >>> described(KeyError("order"))
    "KeyError: 'order'"
    """
    said = _said(error)
    if isinstance(error, BaseExceptionGroup):
        said = f"{said}, the first of them {_said(error.exceptions[0])}"
    place = None if isinstance(error, Refused) else where(error)
    return f"{said[:TEXT_CHARACTERS_MAX]} ({place})" if place else said[:TEXT_CHARACTERS_MAX]


def _said(error: BaseException) -> str:
    text, kind = text_of(error), type(error).__name__
    if text and isinstance(error, Permanent | Misuse):
        return text
    return f"{kind}: {text}" if text else kind


def raised(instance: Instance, move: Step, error: BaseException) -> SagaStepRaised:
    """Return the fact for whoever looks closely."""
    trace = "".join(traceback.format_exception(error))
    return SagaStepRaised(instance.saga_id, instance.saga_type, move.step, move.phase, trace)


def _function(move: Step) -> str:
    """Name the function of a step that has several."""
    match move:
        case Absorb():
            return f'on("{move.mail.name}"): '
        case Send():
            return "undo_payload: " if move.phase == "compensation" else "payload: "
    return ""


def beginning(function: Any) -> str:
    """Name a function, and the line that it begins in.

    >>> beginning(print)
    'print'
    """
    name = getattr(function, "__qualname__", repr(function))
    code = getattr(function, "__code__", None)
    return f"{name} ({short_path(code.co_filename)}:{code.co_firstlineno})" if code else name
